#include "pack/gpu_kernels.h"
