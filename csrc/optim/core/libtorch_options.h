#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace shoestring::optim::detail {

/// Calls visit(name, value) for each option of a group of LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad.
/// Returns false if the options have another class.
template <class Visit>
bool visit_libtorch_options(torch::optim::OptimizerOptions& options, const Visit& visit) {
  namespace libtorch = torch::optim;
  const auto adam = [&](auto& o) {
    visit("lr", o.lr());
    visit("betas", o.betas());
    visit("eps", o.eps());
    visit("weight_decay", o.weight_decay());
    visit("amsgrad", o.amsgrad());
  };
  if (auto* o = dynamic_cast<libtorch::AdamWOptions*>(&options)) {
    adam(*o);
  } else if (auto* o = dynamic_cast<libtorch::AdamOptions*>(&options)) {
    adam(*o);
  } else if (auto* o = dynamic_cast<libtorch::SGDOptions*>(&options)) {
    visit("lr", o->lr());
    visit("momentum", o->momentum());
    visit("dampening", o->dampening());
    visit("weight_decay", o->weight_decay());
    visit("nesterov", o->nesterov());
  } else if (auto* o = dynamic_cast<libtorch::RMSpropOptions*>(&options)) {
    visit("lr", o->lr());
    visit("alpha", o->alpha());
    visit("eps", o->eps());
    visit("weight_decay", o->weight_decay());
    visit("momentum", o->momentum());
    visit("centered", o->centered());
  } else if (auto* o = dynamic_cast<libtorch::AdagradOptions*>(&options)) {
    visit("lr", o->lr());
    visit("lr_decay", o->lr_decay());
    visit("weight_decay", o->weight_decay());
    visit("initial_accumulator_value", o->initial_accumulator_value());
    visit("eps", o->eps());
  } else {
    return false;
  }
  return true;
}

}  // namespace shoestring::optim::detail
