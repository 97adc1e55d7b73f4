#pragma once

/// Includes the whole public API: operators, modules, optimizers and files.
#include <shoestring/amp.h>
#include <shoestring/autograd.h>
#include <shoestring/average_checkpoints.h>
#include <shoestring/checkpoint.h>
#include <shoestring/checkpoint_plan.h>
#include <shoestring/checkpoint_sequence.h>
#include <shoestring/data.h>
#include <shoestring/diffusion.h>
#include <shoestring/embedding.h>
#include <shoestring/host_allocator.h>
#include <shoestring/linear.h>
#include <shoestring/lora.h>
#include <shoestring/model_files.h>
#include <shoestring/nn.h>
#include <shoestring/offload_activations.h>
#include <shoestring/offload_weights.h>
#include <shoestring/ops.h>
#include <shoestring/optim.h>
#include <shoestring/quantized_training.h>
#include <shoestring/safetensors.h>
#include <shoestring/stochastic_depth.h>
#include <shoestring/training.h>
#include <shoestring/version.h>
#include <shoestring/vocab_parallel.h>
