#pragma once

// Helpers for the tests of the low-rank optimizers (GaLore and APOLLO).

#include <cmath>
#include <vector>

#include "optim/optimizers.h"
#include "relative_error.h"

// Low-rank optimizers project the first kProjected of these parameters: a wide matrix, a tall one, a
// convolution's weight and a transposed matrix. By default they do not project the other ones: a matrix with
// a side below the rank, a vector and an empty tensor.
constexpr size_t kProjected = 4;

inline std::vector<at::Tensor> low_rank_parameters(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(5);
  std::vector<at::Tensor> params;
  for (const at::IntArrayRef size : std::vector<std::vector<int64_t>>{
           {24, 40}, {40, 24}, {12, 3, 3, 3}, {48, 16}, {4, 50}, {30}, {0, 8}}) {
    params.push_back(at::randn(size).to(dtype));
  }
  params[3] = params[3].t();
  for (at::Tensor& p : params) p.requires_grad_();
  return params;
}

// Computes AdamW's update for one tensor in fp64, at a learning rate of 1.
struct Adam64 {
  int step = 0;
  at::Tensor m, v;
  at::Tensor operator()(const at::Tensor& g) {
    if (++step == 1) m = at::zeros_like(g), v = at::zeros_like(g);
    m = 0.9 * m + 0.1 * g;
    v = 0.999 * v + 0.001 * g * g;
    return -m / (1 - std::pow(0.9, step)) / ((v / (1 - std::pow(0.999, step))).sqrt() + 1e-4);
  }
};
