#pragma once

#include "kernels/capability.h"
#include "kernels/gated.h"

SHOESTRING_CPU_TABLE(kernels::GatedTable, swiglu)
