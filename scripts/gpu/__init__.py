"""What the GPU scripts share: cases, compiling without a GPU, and floors."""
