"""What a program reads that is not on this machine: data, tokenizers, weights; made up where that was asked for."""
