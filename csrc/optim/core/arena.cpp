#include "optim/core/arena.h"

#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>

#include "optim/split/owners.h"
#include "optim/split/split_params.h"

namespace shoestring::optim::detail {
namespace {

std::string names(const std::map<std::string, Tensor>& tensors) {
  std::string all;
  for (const auto& [name, tensor] : tensors) all += (all.empty() ? "" : ", ") + name;
  return all.empty() ? "none" : all;
}

}  // namespace

Kind kind_of(const Tensor& param, const LowMemoryOptions& options) {
  const SplitParameter* split = split_of(param);
  const int64_t numel = split != nullptr ? split->numel() : param.numel();
  const bool large = numel >= Access::min_quantize_size(options);
  return {large ? Access::state_format(options) : "fp32",
          Access::weight_rounding(options) == "remainder" && param.scalar_type() == at::kBFloat16,
          param.device(), param.device()};
}

std::vector<Part> parts(const Rule& rule, const Kind& kind) {
  std::vector<Part> result;
  for (const auto& m : rule.moments) {
    if (!m.is_kept) continue;
    const auto& [name, scale] = std::tie(m.name, m.scale);
    if (m.is_long && kind.state != "fp32") {
      result.push_back({name, at::kBFloat16, kBlock, true});
    } else if (kind.state == "fp32" || kind.state == "bf16") {
      result.push_back({name, kind.state == "fp32" ? at::kFloat : at::kBFloat16, kBlock, true});
    } else if (kind.state == "8bit") {
      result.push_back({name, at::kByte, kBlock, true});
      result.push_back({scale, at::kFloat, 1, false});
    } else {
      result.push_back({name, at::kByte, kBlock / 2, false});
      result.push_back(
          {scale, at::kFloat, m.is_signed ? kernels::kScales4<true> : kernels::kScales4<false>, false});
    }
  }
  if (kind.remainder) result.push_back({"weight_remainder", at::kShort, kBlock, true});
  return result;
}

Arena::Arena(const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers)
    : kind(kind), params(std::move(params)), blocks(0), numbers(std::move(numbers)) {
  for (const Tensor& p : this->params) {
    begins.push_back(blocks);
    blocks += blocks_of(p);
  }
}

namespace {

bool splits_parameters(const Rule& rule, const Kind& kind) {
  return rule.takes_parts() && kind.device.is_cpu();
}

struct StateShape {
  // `own`: the part that this process steps, or none if it steps all parameters.
  StateShape(const Rule& rule, const Kind& kind, const std::vector<Tensor>& params,
             const std::optional<Owned>& own)
      : splits(splits_parameters(rule, kind)) {
    for (const Part& part : parts(rule, kind)) {
      dtypes.push_back(part.dtype);
      per_block.push_back(part.per_block);
    }
    const size_t last = own ? own->last : params.size();
    for (size_t i = own ? own->first : 0; i < last; ++i) sizes.push_back(blocks_of(params[i]));
    if (!own || sizes.empty()) return;
    sizes.front() -= own->first_block;
    sizes.back() -= std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) - own->blocks;
  }

  std::vector<at::ScalarType> dtypes;
  std::vector<int64_t> per_block, sizes;
  bool splits;
};

}  // namespace

namespace {

// Splits `blocks` blocks evenly over processes, in their order.
std::vector<Owned> split_over(int64_t processes, const std::vector<int64_t>& begins, int64_t blocks) {
  std::vector<Owned> parts(static_cast<size_t>(processes));
  const int64_t each = (blocks + processes - 1) / processes;
  const auto from_block = [&](int64_t block) {  // the first parameter that does not begin before a block
    return static_cast<size_t>(std::lower_bound(begins.begin(), begins.end(), block) - begins.begin());
  };
  for (int64_t process = 0; process < processes; ++process) {
    const int64_t from = std::min(each * process, blocks), to = std::min(from + each, blocks);
    if (from == to) continue;
    // An empty parameter belongs to the process of the next one, or to the last process.
    size_t first = from_block(from);
    if (first == begins.size() || begins[first] != from) --first;
    const size_t last = to == blocks ? begins.size() : from_block(to);
    parts[static_cast<size_t>(process)] = {first, last, from - begins[first], to - from};
  }
  return parts;
}

// The parameters of an arena with their numbers, in the order of the processes that own them.
struct Members {
  std::vector<Tensor> params;
  std::vector<int64_t> numbers;
  std::vector<Owned> owned;
};

// Gives each parameter to one process, so that all have about the same work.
Members by_owner(const Rule& rule, std::vector<Tensor> params, std::vector<int64_t> numbers,
                 int64_t processes) {
  std::vector<double> costs;
  for (const Tensor& p : params)
    costs.push_back(rule.takes_matrices_alone ? matrix_cost(p.sizes()) : static_cast<double>(p.numel()));
  const std::vector<int64_t> owners = owners_of(costs, processes);
  Members sorted;
  int64_t block = 0;
  for (int64_t process = 0; process < processes; ++process) {
    const size_t first = sorted.params.size();
    const int64_t begin = block;
    for (size_t i = 0; i < params.size(); ++i) {
      if (owners[i] != process) continue;
      block += blocks_of(params[i]);
      sorted.params.push_back(params[i]);
      sorted.numbers.push_back(numbers[i]);
    }
    const size_t last = sorted.params.size();
    sorted.owned.push_back(first == last ? Owned{} : Owned{first, last, 0, block - begin});
  }
  return sorted;
}

Members members_of(const Rule& rule, const Kind& kind, std::vector<Tensor> params,
                   std::vector<int64_t> numbers, const std::optional<Ranks>& ranks) {
  if (!ranks.has_value()) return {std::move(params), std::move(numbers), {}};
  if (!splits_parameters(rule, kind))
    return by_owner(rule, std::move(params), std::move(numbers), ranks->count);
  std::vector<int64_t> begins;
  int64_t blocks = 0;
  for (const Tensor& p : params) {
    begins.push_back(blocks);
    blocks += blocks_of(p);
  }
  std::vector<Owned> owned = split_over(ranks->count, begins, blocks);
  return {std::move(params), std::move(numbers), std::move(owned)};
}

}  // namespace

int64_t offloaded_bytes(const Rule& rule, const Kind& kind, const std::vector<Tensor>& params,
                        const std::vector<int64_t>& numbers, const std::optional<Ranks>& ranks) {
  const Members members = members_of(rule, kind, params, numbers, ranks);
  std::optional<Owned> owned_part;
  if (ranks) owned_part = members.owned[static_cast<size_t>(ranks->rank)];
  if (owned_part && owned_part->blocks == 0) return 0;
  const StateShape shape(rule, kind, members.params, owned_part);
  return offload::State::bytes(shape.dtypes, shape.per_block, shape.sizes, shape.splits);
}

Arena::Arena(const Rule& rule, const Kind& kind, std::vector<Tensor> members, std::vector<int64_t> numbers,
             const c10::intrusive_ptr<offload::Offload>& offload, bool on_host,
             const std::optional<Ranks>& ranks)
    : Arena(kind, {}, {}) {
  Members members_here = members_of(rule, kind, std::move(members), std::move(numbers), ranks);
  *this = Arena(kind, std::move(members_here.params), std::move(members_here.numbers));
  std::optional<Owned> owned_part;
  if (ranks.has_value()) {
    rank = static_cast<size_t>(ranks->rank);
    group = ranks->group;
    owned = std::move(members_here.owned);
    owned_part = owned[rank];
  }
  const auto fp32 = at::TensorOptions().device(kind.device).dtype(at::kFloat);
  step = at::zeros({static_cast<int64_t>(params.size())}, fp32);
  const auto every = parts(rule, kind);
  if (on_host) {
    host = c10::make_intrusive<offload::HostParams>(offload, params);
    weights = host->weights();
  } else if (offload != nullptr && (!owned_part || owned_part->blocks > 0)) {
    const StateShape shape(rule, kind, params, owned_part);
    offloaded = c10::make_intrusive<offload::State>(offload, shape.dtypes, shape.per_block, shape.sizes,
                                                    shape.splits);
    if (!owned_part) {
      begins = offloaded->begins();
      blocks = offloaded->total();
    }
    for (size_t i = 0; i < every.size(); ++i) values[every[i].name] = offloaded->values()[i];
    return;
  }
  for (const Part& part : every) {
    values[part.name] =
        at::zeros({(owned_part ? owned_part->blocks : blocks) * part.per_block}, fp32.dtype(part.dtype));
  }
}

std::vector<std::vector<ParameterPart>> Arena::split(const Rule& rule, std::vector<Tensor> params,
                                                     int64_t ranks, bool on_cpu) {
  const at::Device device(on_cpu ? at::kCPU : at::kMeta);
  const Kind kind{"fp32", false, device, device};
  std::vector<int64_t> numbers(params.size());
  Members members = members_of(rule, kind, std::move(params), std::move(numbers), Ranks{0, ranks, ""});
  Arena arena(kind, std::move(members.params), std::move(members.numbers));
  arena.owned = std::move(members.owned);
  std::vector<std::vector<ParameterPart>> parts;
  for (size_t process = 0; process < arena.owned.size(); ++process) parts.push_back(arena.parts_of(process));
  return parts;
}

std::pair<int64_t, int64_t> Arena::elements_of(size_t process, size_t index) const {
  const Owned& part = owned[process];
  if (index < part.first || index >= part.last) return {0, 0};
  const int64_t from = begins[part.first] + part.first_block, to = from + part.blocks;
  const auto clamped = [&](int64_t block) {
    return std::clamp<int64_t>((block - begins[index]) * kBlock, 0, params[index].numel());
  };
  return {clamped(from), clamped(to)};
}

std::vector<ParameterPart> Arena::parts_of(size_t process) const {
  std::vector<ParameterPart> result;
  for (size_t i = owned[process].first; i < owned[process].last; ++i) {
    const auto [begin, end] = elements_of(process, i);
    if (begin < end) result.push_back({params[i], begin, end});
  }
  return result;
}

Arena Arena::piece(const Owned& part) const {
  const auto from = static_cast<int64_t>(part.first), to = static_cast<int64_t>(part.last);
  Arena piece(kind, {params.begin() + from, params.begin() + to},
              {numbers.begin() + from, numbers.begin() + to});
  if (part.first_block != 0 || part.blocks != piece.blocks) piece.part = {part.first_block, part.blocks};
  piece.step = step.narrow(0, from, to - from);
  return piece;
}

Arena Arena::own_piece() const {
  Arena stepped = piece(owned[rank]);
  stepped.values = values;
  if (offloaded == nullptr) return stepped;
  if (stepped.part) {  // chunks end within parameters, whose blocks follow each other
    for (auto& [name, value] : stepped.values)
      value = value.narrow(0, 0, value.numel() / offloaded->total() * stepped.part->second);
  } else {
    stepped.offloaded = offloaded;
    stepped.begins = offloaded->begins();
    stepped.blocks = offloaded->total();
  }
  return stepped;
}

std::map<std::string, SplitTensor> Arena::splits(const Rule& rule, size_t index) const {
  const Tensor& p = params[index];
  SplitParameter of;
  of.groups = {group};
  of.piece = static_cast<int64_t>(rank);
  of.sizes = p.sizes().vec();
  of.device = kind.source.type();
  // The processes with elements of a parameter follow each other, and the first of them has its step. Of an
  // empty parameter, all of them may have none.
  std::vector<int64_t> elements{0}, ones{0};
  for (size_t process = 0; process < owned.size(); ++process) {
    const auto [begin, end] = elements_of(process, index);
    const bool is_first = ones.back() == 0 && index >= owned[process].first && index < owned[process].last;
    elements.push_back(elements.back() + end - begin);
    ones.push_back(ones.back() + (is_first ? 1 : 0));
  }
  of.begins = elements;
  std::map<std::string, SplitTensor> result;
  if (ones.back() > 0) result["step"] = {of, ones, {}};
  for (const Part& part : parts(rule, kind)) {
    std::vector<int64_t> begins = elements;
    if (!part.shaped) {
      for (int64_t& begin : begins) begin = (begin + kBlock - 1) / kBlock * part.per_block;
    }
    result.emplace(part.name, SplitTensor{of, std::move(begins), part.shape(p)});
  }
  for (const Extra& extra : rule.extras) {  // whole, in the process that steps the parameter
    std::vector<int64_t> begins = ones, sizes = extra.shape_of(p);
    for (int64_t& begin : begins) begin *= c10::multiply_integers(sizes);
    result.emplace(extra.name, SplitTensor{of, std::move(begins), std::move(sizes)});
  }
  return result;
}

void Arena::check_place(const std::string& optimizer) const {
  for (const Tensor& p : params) {
    TORCH_CHECK(p.device() == kind.source, optimizer, ": params: expected all parameters on ", kind.source,
                ", for which their state was made, received one on ", p.device(),
                ". Make the optimizer after the model has been moved.");
  }
}

std::map<std::string, Tensor> Arena::views(const Rule& rule, size_t index) const {
  const Tensor& p = params[index];
  std::map<std::string, Tensor> views{{"step", step.select(0, static_cast<int64_t>(index))}};
  if (!owned.empty()) {
    // a part of the parameter: the elements that this process steps, or the blocks around them
    const auto [begin, end] = elements_of(rank, index);
    const Owned& owned_part = owned[rank];
    int64_t block =
        owns(index) ? begins[index] + begin / kBlock - begins[owned_part.first] - owned_part.first_block : 0;
    if (offloaded != nullptr && owns(index)) {
      block = offloaded->begins()[index - owned_part.first] + begin / kBlock -
              (index == owned_part.first ? owned_part.first_block : 0);
    }
    for (const Part& part : parts(rule, kind)) {
      const int64_t size = part.shaped ? end - begin : (end - begin + kBlock - 1) / kBlock * part.per_block;
      views[part.name] = values.at(part.name).narrow(0, block * part.per_block, size);
    }
    return views;
  }
  for (const Part& part : parts(rule, kind)) {
    const auto shape = part.shape(p);
    const Tensor& all = values.at(part.name);
    views[part.name] =
        all.narrow(0, begins[index] * part.per_block, c10::multiply_integers(shape)).view(shape);
  }
  return views;
}

void Arena::set_state(const Rule& rule, size_t index, const std::map<std::string, Tensor>& state,
                      bool is_part) {
  std::map<std::string, Tensor> values_here = views(rule, index);
  values_here.at("step").copy_(state.at("step"));
  const bool narrows = !owned.empty() && !is_part;
  const auto places = narrows ? splits(rule, index) : std::map<std::string, SplitTensor>();
  for (const Part& part : parts(rule, kind)) {
    Tensor& to = values_here.at(part.name);
    const Tensor& saved = state.at(part.name);
    to.copy_(narrows ? saved.reshape({-1}).narrow(0, places.at(part.name).begin(), to.numel()) : saved);
  }
}

std::vector<Tensor> Arena::accumulated_views(at::ScalarType dtype) {
  if (!accumulated.defined()) {
    accumulated = at::zeros({blocks * kBlock}, at::TensorOptions().device(kind.device).dtype(dtype));
  }
  std::vector<Tensor> views;
  for (size_t i = 0; i < params.size(); ++i) {
    views.push_back(accumulated.narrow(0, begins[i] * kBlock, params[i].numel()).view(params[i].sizes()));
  }
  return views;
}

Arena Arena::run(const Rule& rule, size_t first, size_t last) const {
  const auto from = static_cast<int64_t>(first), to = static_cast<int64_t>(last);
  Arena some(kind, {params.begin() + from, params.begin() + to},
             {numbers.begin() + from, numbers.begin() + to});
  some.step = step.narrow(0, from, to - from);
  for (const Part& part : parts(rule, kind)) {
    const Tensor& all = values.at(part.name);
    some.values[part.name] = all.narrow(0, begins[first] * part.per_block, some.blocks * part.per_block);
  }
  if (accumulated.defined())
    some.accumulated = accumulated.narrow(0, begins[first] * kBlock, some.blocks * kBlock);
  if (!weights.empty()) some.weights = {weights.begin() + from, weights.begin() + to};
  some.offloaded = offloaded;
  some.start = start + from;
  return some;
}

void Arena::in_pieces(const Rule& rule, const Gradients& grads, const Tensor& accumulated,
                      c10::function_ref<void(const Arena&, const Gradients&, const Tensor&)> step_piece) {
  // `offloaded` has the parameters from `start` on, or those that this process steps: index `shift` of this
  // arena is its parameter 0, which begins at block `skipped`.
  const auto shift = owned.empty() ? -start : static_cast<int64_t>(owned[rank].first);
  const int64_t skipped = owned.empty() ? 0 : owned[rank].first_block;
  const int64_t from = owned.empty() ? start : 0;
  const int64_t end =
      owned.empty() ? start + std::ssize(params) : static_cast<int64_t>(owned[rank].last - owned[rank].first);
  const auto defined = [](const Tensor& g) { return g.defined(); };
  const auto every = parts(rule, kind);
  std::vector<int64_t> with_gradients;
  for (const int64_t chunk : offloaded->chunks(from, end)) {
    const auto at = offloaded->piece(chunk, from, end);
    const auto first = grads.begin() + at.first + shift, last = grads.begin() + at.last + shift;
    if (std::any_of(first, last, defined)) with_gradients.push_back(chunk);
  }
  if (!stepped.defined()) stepped = step.clone();
  offloaded->start(with_gradients);
  for (const int64_t chunk : with_gradients) {
    if (offloaded->done(chunk)) continue;
    const auto device = offloaded->take(chunk);
    const auto at = offloaded->piece(chunk, from, end);
    const int64_t first = at.first + shift, last = at.last + shift;
    const int64_t first_block = at.first_block + (at.first == 0 ? skipped : 0);
    Arena piece =
        this->piece({static_cast<size_t>(first), static_cast<size_t>(last), first_block, at.blocks});
    piece.step = piece.step.clone();
    for (size_t i = 0; i < every.size(); ++i) {
      const int64_t n = every[i].per_block;
      piece.values[every[i].name] = device[i].narrow(0, at.offset * n, at.blocks * n);
    }
    Gradients own(grads.begin() + first, grads.begin() + last);
    if (!owned.empty()) take_elements(own, first, first_block, at.blocks);
    const int64_t begin = (begins[static_cast<size_t>(first)] + first_block) * kBlock;
    step_piece(piece, own,
               accumulated.defined() ? accumulated.narrow(0, begin, at.blocks * kBlock) : Tensor());
    stepped.narrow(0, first, last - first).copy_(piece.step);
    offloaded->put(chunk);
  }
}

// Replaces gradients of the elements that this process steps by those of `blocks` blocks, from a block of
// parameter `first` on. Gradients of whole parameters stay.
void Arena::take_elements(Gradients& grads, int64_t first, int64_t first_block, int64_t blocks) const {
  int64_t from = first_block;
  for (size_t i = 0; i < grads.size(); ++i, from = 0) {
    const size_t index = static_cast<size_t>(first) + i;
    const int64_t count = std::min(blocks, blocks_of(params[index]) - from);
    blocks -= count;
    if (!grads[i].defined() || grads[i].numel() == params[index].numel()) continue;
    const int64_t begin = from * kBlock - elements_of(rank, index).first;
    const int64_t most = params[index].numel() - from * kBlock;
    grads[i] = grads[i].narrow(0, begin, std::min(count * kBlock, most));
  }
}

void Arena::commit() {
  if (stepped.defined()) step.copy_(stepped);
  stepped = Tensor();
  offloaded->commit();
}

void check_state(const Rule& rule, const ParamState& state, const Tensor& param, const Kind& kind) {
  std::map<std::string, Tensor> expected{{"step", at::empty({0})}};
  for (const Part& part : parts(rule, kind)) expected[part.name];
  for (const Extra& extra : rule.extras) expected[extra.name];
  const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
  const auto& tensors = state.tensors();
  TORCH_CHECK(std::equal(expected.begin(), expected.end(), tensors.begin(), tensors.end(), same), rule.name,
              ": state_format=\"", kind.state, "\": expected the entries ", names(expected), ", received ",
              names(tensors));
  const auto fits = [&](const std::string& name, at::ScalarType dtype, at::IntArrayRef shape) {
    const Tensor& t = tensors.at(name);
    TORCH_CHECK(t.defined() && t.scalar_type() == dtype && t.sizes() == shape, rule.name, ": ", name,
                ": expected ", dtype, " ", shape, " for a parameter of ", param.sizes(), ", received ",
                t.defined() ? c10::str(t.scalar_type(), " ", t.sizes()) : "none");
  };
  fits("step", at::kFloat, {});
  for (const Part& part : parts(rule, kind)) fits(part.name, part.dtype, part.shape(param));
  for (const Extra& extra : rule.extras) fits(extra.name, at::kFloat, extra.shape_of(param));
}

}  // namespace shoestring::optim::detail
