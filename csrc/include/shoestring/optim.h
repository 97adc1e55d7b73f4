#pragma once

// Includes the headers of all optimizers and schedules.

#include <shoestring/optim/averages.h>
#include <shoestring/optim/batch_norm.h>
#include <shoestring/optim/grad_scaler.h>
#include <shoestring/optim/gradient_noise.h>
#include <shoestring/optim/guard.h>
#include <shoestring/optim/rules.h>
#include <shoestring/optim/schedules.h>
#include <shoestring/optim/unfreezing.h>
#include <shoestring/optim/wrappers.h>
