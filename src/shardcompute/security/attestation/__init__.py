"""Attestation: evidence of the hardware that a node runs in, verified against roots that the operator gives.

`evidence` is what a machine shows, `policy` what an operator asks for, `verifiers` finds who judges a kind of evidence.
Reports of AMD SEV-SNP and quotes of Intel TDX are verified here (`sev_snp`, `tdx`); other packages may add kinds.
"""
