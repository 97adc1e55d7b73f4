#pragma once

#include "core/capability.h"
#include "layers/gated_table.h"

SHOESTRING_CPU_TABLE(kernels::GatedTable, swiglu)
