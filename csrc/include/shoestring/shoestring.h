#pragma once

/// Everything: operators, modules, optimizers, files.
#include <shoestring/ops.h>
#include <shoestring/optim.h>
#include <shoestring/safetensors.h>
#include <shoestring/version.h>
