"""Analyses of attention matrices that reproduce figures of the papers on real data: sparsity, spectrum and budget."""
