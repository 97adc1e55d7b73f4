#pragma once

// Includes the headers of all optimizers.

#include <shoestring/optim/rules.h>
#include <shoestring/optim_wrappers.h>
