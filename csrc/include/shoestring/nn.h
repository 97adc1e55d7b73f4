#pragma once

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/adapters/adapter.h>
#include <shoestring/adapters/conv.h>
#include <shoestring/adapters/embedding.h>
#include <shoestring/adapters/virtual_tokens.h>
#include <shoestring/blocks/attention.h>
#include <shoestring/blocks/gated_mlp.h>
#include <shoestring/experts/experts.h>
#include <shoestring/experts/mixture_of_depths.h>
#include <shoestring/experts/moe.h>
#include <shoestring/experts/router.h>
#include <shoestring/gemm/linear.h>
#include <shoestring/layers/init.h>
#include <shoestring/layers/norm.h>
#include <shoestring/quantization/fake_quantized_linear.h>
#include <shoestring/quantization/quantized_linear.h>
