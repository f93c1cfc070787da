// The kernels of rope.cpp for processors that round fp32 to bf16 in one instruction.
#include "rope.cpp"
