// Spectral conditions (arXiv 2310.17813) give the table of MupGroup in one formula each: Adam's rate is
// proportional to 1 / fan_in, SGD's to fan_out / fan_in, and the deviation to min(1, sqrt(fan_out / fan_in))
// / sqrt(fan_in).

#include "layers/mup_rule.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <unordered_map>

#include <torch/custom_class.h>
#include <torch/library.h>

#include "core/name_patterns.h"

namespace shoestring::nn::init {
namespace {

constexpr const char* kMup = "mup_groups";

/// Fan-in and fan-out of a parameter, as multiples of those of the base model.
struct Ratios {
  double in = 1, out = 1;
  bool operator==(const Ratios&) const = default;

  const char* kind() const {
    if (in == 1) return out == 1 ? "fixed" : "input";
    return out == 1 ? "output" : "hidden";
  }
  double lr(bool sgd) const { return sgd ? out / in : 1 / in; }
  double deviation() const { return std::min(1.0, std::sqrt(out / in)) / std::sqrt(in); }
};

/// Returns the ratio of each dimension to that of the base model.
std::vector<double> ratios_of_dimensions(const MupRole& role, const std::vector<int64_t>& base) {
  TORCH_CHECK_VALUE(base.size() == role.sizes.size(), kMup, ": base: expected ", role.sizes.size(),
                    " dimensions of ", role.name, ", received ", base.size());
  std::vector<double> each;
  for (size_t d = 0; d < base.size(); ++d)
    each.push_back(
        role.sizes[d] == base[d] ? 1.0 : static_cast<double>(role.sizes[d]) / static_cast<double>(base[d]));
  return each;
}

/// Returns the ratios of fan-in and fan-out from the ratio of each dimension.
Ratios ratios_of(const MupRole& role, const std::vector<double>& each, const MupOptions& options) {
  std::vector<double> grown;
  std::copy_if(each.begin(), each.end(), std::back_inserter(grown), [](double r) { return r != 1; });
  const bool is_even = std::adjacent_find(grown.begin(), grown.end(), std::not_equal_to<>()) == grown.end();
  for (const auto& [pattern, kind] : options.kinds()) {
    if (!matches(pattern, role.name) || grown.empty()) continue;
    TORCH_CHECK_VALUE(is_even, kMup, ": kinds: expected dimensions of ", role.name,
                      " that grow by the same factor, received others");
    return kind == "input" ? Ratios{1, grown[0]} : Ratios{grown[0], 1};
  }
  if (grown.empty()) return {};
  if (each.size() == 1) return {1, each[0]};
  if (role.layout == MupLayout::kOutIn) return {each[1], each[0]};
  if (role.layout == MupLayout::kInOut) return {each[0], each[1]};
  TORCH_CHECK_VALUE(grown.size() > 1 && is_even, kMup, ": kinds: expected \"input\" or \"output\" for ",
                    role.name, ", since its module does not tell it, received none");
  return {grown[0], grown[0]};
}

void check_options(const std::vector<MupRole>& roles, const MupOptions& options) {
  TORCH_CHECK_VALUE(options.optimizer() == "adam" || options.optimizer() == "sgd", kMup,
                    ": optimizer: expected \"adam\" or \"sgd\", received \"", options.optimizer(), "\"");
  std::vector<std::string> names;
  for (const MupRole& role : roles) names.push_back(role.name);
  for (const auto& [pattern, kind] : options.kinds()) {
    matching(kMup, "kinds", pattern, names);
    TORCH_CHECK_VALUE(kind == "input" || kind == "output", kMup,
                      ": kinds: expected \"input\" or \"output\" for \"", pattern, "\", received \"", kind,
                      "\"");
  }
}

}  // namespace

MupSizes sizes_by_width(const std::map<int64_t, int64_t>& widths, const std::vector<MupRole>& roles,
                        const char* argument) {
  std::set<int64_t> sizes;
  for (const MupRole& role : roles) sizes.insert(role.sizes.begin(), role.sizes.end());
  for (const auto& [width, base] : widths) {
    TORCH_CHECK_VALUE(width > 0 && base > 0, kMup, ": ", argument, ": expected numbers above 0, received ",
                      width, " and ", base);
    TORCH_CHECK_VALUE(sizes.count(width) > 0, kMup, ": ", argument,
                      ": expected sizes of dimensions, received ", width, ", which no parameter has");
  }
  MupSizes base;
  for (const MupRole& role : roles) {
    std::vector<int64_t>& role_sizes = base[role.name] = role.sizes;
    for (int64_t& size : role_sizes) {
      const auto found = widths.find(size);
      if (found != widths.end()) size = found->second;
    }
  }
  return base;
}

std::vector<MupScale> mup_scales(const std::vector<MupRole>& roles, const MupSizes& base,
                                 const MupOptions& options) {
  check_options(roles, options);
  std::vector<MupScale> scales;
  std::unordered_map<int64_t, std::tuple<const MupRole*, Ratios>> seen;
  for (size_t i = 0; i < roles.size(); ++i) {
    const MupRole& role = roles[i];
    if (!role.trained) continue;
    const auto sizes = base.find(role.name);
    TORCH_CHECK_VALUE(sizes != base.end(), kMup, ": base: expected a parameter ", role.name,
                      ", received none");
    const Ratios ratios = ratios_of(role, ratios_of_dimensions(role, sizes->second), options);
    const auto [entry, is_new] = seen.try_emplace(role.tensor, &role, ratios);
    const auto& [first, before] = entry->second;
    TORCH_CHECK_VALUE(before == ratios, kMup, ": ", role.name, ": expected one role, received that of \"",
                      before.kind(), "\" (", first->name, ") and of \"", ratios.kind(),
                      "\". Untie the weights.");
    if (is_new)
      scales.push_back({static_cast<int64_t>(i), ratios.kind(), ratios.lr(options.optimizer() == "sgd"),
                        ratios.deviation()});
  }
  return scales;
}

namespace {

/// The rule for modules of Python.
struct Mup : torch::CustomClassHolder {
  using Scale = std::tuple<int64_t, std::string, double, double>;

  Mup(const std::vector<std::string>& names, const std::vector<int64_t>& layouts,
      const std::vector<std::vector<int64_t>>& sizes, const std::vector<int64_t>& tensors,
      const c10::List<bool>& trained) {
    for (size_t i = 0; i < names.size(); ++i)
      roles.push_back({names[i], static_cast<MupLayout>(layouts[i]), sizes[i], tensors[i], trained[i]});
  }

  std::vector<Scale> by_name(const std::vector<std::string>& names,
                             const std::vector<std::vector<int64_t>>& base_sizes,
                             const c10::Dict<std::string, std::string>& kinds, const std::string& optimizer) {
    MupSizes base;
    for (size_t i = 0; i < names.size(); ++i) base.emplace(names[i], base_sizes[i]);
    return scales(base, kinds, optimizer);
  }
  std::vector<Scale> by_width(const c10::Dict<int64_t, int64_t>& widths,
                              const c10::Dict<std::string, std::string>& kinds,
                              const std::string& optimizer) {
    std::map<int64_t, int64_t> base;
    for (const auto& item : widths) base.emplace(item.key(), item.value());
    return scales(sizes_by_width(base, roles, "base"), kinds, optimizer);
  }

  std::vector<Scale> scales(const MupSizes& base, const c10::Dict<std::string, std::string>& kinds,
                            const std::string& optimizer) const {
    MupOptions options;
    options.optimizer(optimizer);
    for (const auto& item : kinds) options.kinds()[item.key()] = item.value();
    std::vector<Scale> result;
    for (const MupScale& scale : mup_scales(roles, base, options))
      result.emplace_back(scale.role, scale.kind, scale.lr, scale.deviation);
    return result;
  }

  std::vector<MupRole> roles;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<Mup>("Mup")
      .def(torch::init<std::vector<std::string>, std::vector<int64_t>, std::vector<std::vector<int64_t>>,
                       std::vector<int64_t>, c10::List<bool>>())
      .def("by_name", &Mup::by_name)
      .def("by_width", &Mup::by_width);
}

}  // namespace shoestring::nn::init
