// The kernels of norm_rope.cpp for processors that round fp32 to bf16 in one instruction.
#include "norm_rope.cpp"
