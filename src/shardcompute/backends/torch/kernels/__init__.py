"""Our own CUDA kernels, in Triton. Imported only where `can_fuse` says so; nothing else imports Triton.

Every kernel reads lengths and positions from device memory, so that its launch does not depend on them and a
captured graph stays valid. With `PDL`, a kernel may start while the one before it ends (programmatic dependent
launch): it waits before it reads what that one wrote, and before it writes anything.
"""
