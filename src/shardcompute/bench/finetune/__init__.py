"""Speed of fine-tuning: against `peft` in one process, and of two workers against one."""
