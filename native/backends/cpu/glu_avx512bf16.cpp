// The kernels of glu.cpp for processors that round fp32 to bf16 in one instruction.
#include "glu.cpp"
