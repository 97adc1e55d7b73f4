#pragma once

/// Everything: operators, modules, optimizers.
#include <shoestring/ops.h>
#include <shoestring/version.h>
