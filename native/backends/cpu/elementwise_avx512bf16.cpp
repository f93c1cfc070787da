// The kernels of elementwise.cpp for processors that round fp32 to bf16 in one instruction.
#include "elementwise.cpp"
