#pragma once

// The rule of muP: how learning rates and initial deviations change with the sizes of a parameter.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <shoestring/layers/init.h>

namespace shoestring::nn::init {

/// Says which dimensions of a parameter are fan-out and fan-in.
enum class MupLayout : int64_t {
  kUnknown,
  kOutIn,  // (fan-out, fan-in, ...), as in linear layers
  kInOut,  // (fan-in, fan-out, ...), as in embeddings
};

/// A parameter under one of its names. Names of one tensor have the same number `tensor`.
struct MupRole {
  std::string name;
  MupLayout layout;
  std::vector<int64_t> sizes;
  int64_t tensor;
  bool trained;
};

/// The multipliers of roles[role].
struct MupScale {
  int64_t role;
  std::string kind;
  double lr, deviation;
};

/// The sizes of the parameters of a model, by their names.
using MupSizes = std::map<std::string, std::vector<int64_t>>;

/// Returns the sizes of the parameters in a base model whose dimensions have the sizes widths[size].
/// `argument` is the name of `widths` in errors.
MupSizes sizes_by_width(const std::map<int64_t, int64_t>& widths, const std::vector<MupRole>& roles,
                        const char* argument);

/// Returns the multipliers of each trained tensor, under its first name. `base`: the sizes in the base model.
std::vector<MupScale> mup_scales(const std::vector<MupRole>& roles, const MupSizes& base,
                                 const MupOptions& options);

}  // namespace shoestring::nn::init
