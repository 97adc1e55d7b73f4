#pragma once

#include <shoestring/nn/adapter.h>
#include <shoestring/nn/attention.h>
#include <shoestring/nn/conv.h>
#include <shoestring/nn/embedding.h>
#include <shoestring/nn/fake_quantized_linear.h>
#include <shoestring/nn/gated_mlp.h>
#include <shoestring/nn/init.h>
#include <shoestring/nn/linear.h>
#include <shoestring/nn/norm.h>
#include <shoestring/nn/plain_linear.h>
#include <shoestring/nn/quantized_linear.h>
#include <shoestring/nn/virtual_tokens.h>
