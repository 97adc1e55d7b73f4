#pragma once

/// Includes the operators of all rooms.
#include <shoestring/adapters/ops.h>
#include <shoestring/attention/ops.h>
#include <shoestring/core/ops.h>
#include <shoestring/experts/ops.h>
#include <shoestring/gemm/ops.h>
#include <shoestring/layers/ops.h>
#include <shoestring/losses/ops.h>
#include <shoestring/quantization/ops.h>
