#pragma once

// All optimizers.

#include <shoestring/optim/rules.h>
#include <shoestring/optim_wrappers.h>
