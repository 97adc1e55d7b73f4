#pragma once

// The arguments of an operator as one struct. Its static function
//
//     template <class Self, class Visitor> static void fields(Self& self, Visitor& visit);
//
// lists the arguments in the order of the schema: `visit("name", self.member)` for an argument, whose default
// is the member's value in a new struct; visit.required() for a number, string or list without a default;
// visit.changed() for a tensor that the operator changes in place; visit.state() for such a tensor that may
// be None but has no default; visit.keywords() before the arguments that Python passes by name only. A tensor
// that is not optional has no default. Structs compose: `fields` may call the `fields` of a member, or a
// function that lists some options. An object whose arguments depend on its members, such as the moments of
// an optimizer (optim/optimizer.h), is passed to schema_of(), push_fields() and read_fields() itself.
//
// From `fields` this file derives the text of the schema, and how the arguments are put on a stack, read from
// it and saved for backward. All of these go by position, so no name is looked up in a call.

#include <array>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace shoestring {

namespace fields {

/// Converts a member to a value on the stack.
template <class T>
c10::IValue to_value(const T& x) {
  return c10::IValue(x);
}
template <size_t n>
c10::IValue to_value(const std::array<bool, n>& flags) {
  c10::List<bool> list;
  list.reserve(n);
  for (const bool flag : flags) list.push_back(flag);
  return list;
}
template <size_t n>
c10::IValue to_value(const std::array<int64_t, n>& numbers) {
  return c10::List<int64_t>(at::IntArrayRef(numbers));
}

/// Converts a value on the stack to a member.
template <class T>
void from_value(const c10::IValue& value, T& x) {
  x = value.to<T>();
}
inline void from_value(const c10::IValue& value, at::Tensor& x) { x = value.toTensor(); }
inline void from_value(const c10::IValue& value, std::string& x) { x = value.toStringRef(); }
inline void from_value(const c10::IValue& value, std::optional<at::Tensor>& x) {
  if (value.isNone()) {
    x.reset();
  } else {
    x = value.toTensor();
  }
}
inline void from_value(const c10::IValue& value, std::vector<std::optional<at::Tensor>>& list) {
  const auto values = value.toListRef();
  list.clear();
  list.reserve(values.size());
  for (const c10::IValue& item : values) {
    const bool is_given = item.isTensor() && item.toTensor().defined();
    list.push_back(is_given ? std::optional(item.toTensor()) : std::nullopt);
  }
}
template <size_t n>
void from_value(const c10::IValue& value, std::array<bool, n>& flags) {
  const c10::List<bool> list = value.toBoolList();
  for (size_t i = 0; i < n; ++i) flags[i] = list.get(i);
}
template <size_t n>
void from_value(const c10::IValue& value, std::array<int64_t, n>& numbers) {
  const c10::List<int64_t> list = value.toIntList();
  for (size_t i = 0; i < n; ++i) numbers[i] = list.get(i);
}

/// Calls visit(name, member) for every argument, however it is marked.
template <class Visit>
struct Each {
  Visit visit;
  template <class T>
  void operator()(const char* name, T& x) {
    visit(name, x);
  }
  template <class T>
  void required(const char* name, T& x) {
    visit(name, x);
  }
  template <class T>
  void changed(const char* name, T& x) {
    visit(name, x);
  }
  void state(const char* name, auto& x, bool) { visit(name, x); }
  void keywords() {}
};
template <class Visit>
Each(Visit) -> Each<Visit>;

/// Writes the arguments of a schema. Each tensor that the operator changes has a letter of its own, because
/// tensors with the same letter may share memory.
class SchemaText {
 public:
  void operator()(const char* name, const at::Tensor&) { add("Tensor", name); }
  void operator()(const char* name, const std::vector<at::Tensor>&) { add("Tensor[]", name); }
  void operator()(const char* name, const std::vector<std::optional<at::Tensor>>&) { add("Tensor?[]", name); }
  template <class T>
  void operator()(const char* name, const T& x) {
    add(type(x), name, default_of(x));
  }
  template <class T>
  void required(const char* name, const T& x) {
    add(type(x), name);
  }
  void changed(const char* name, const at::Tensor&) { add(changed(), name); }
  void changed(const char* name, const std::vector<at::Tensor>&) { add(changed() + "[]", name); }
  void changed(const char* name, const std::optional<at::Tensor>&) { add(changed() + "?", name, "None"); }
  void state(const char* name, const std::optional<at::Tensor>&, bool may_be_none) {
    add(changed() + (may_be_none ? "?" : ""), name);
  }
  void keywords() { add("*", ""); }

  std::string text;

 private:
  static std::string type(double) { return "float"; }
  static std::string type(int64_t) { return "int"; }
  static std::string type(bool) { return "bool"; }
  static std::string type(const std::string&) { return "str"; }
  static std::string type(at::ScalarType) { return "ScalarType"; }
  static std::string type(const at::Tensor&) { return "Tensor"; }
  template <size_t n>
  static std::string type(const std::array<int64_t, n>&) {
    return "int[]";
  }
  template <size_t n>
  static std::string type(const std::array<bool, n>&) {
    return "bool[" + std::to_string(n) + "]";
  }
  template <class T>
  static std::string type(const std::vector<T>&) {
    return type(T()) + "[]";
  }
  template <class T>
  static std::string type(const std::optional<T>&) {
    return type(T()) + "?";
  }

  static std::string default_of(double x) {
    const std::string number = c10::str(x);
    return number.find_first_of(".e") == std::string::npos ? number + "." : number;
  }
  static std::string default_of(int64_t x) { return std::to_string(x); }
  static std::string default_of(bool x) { return x ? "True" : "False"; }
  static std::string default_of(at::ScalarType x) { return std::to_string(static_cast<int>(x)); }
  static std::string default_of(const std::string& x) { return "'" + x + "'"; }
  template <class T>
  static std::string default_of(const std::optional<T>& x) {
    return x ? default_of(*x) : "None";
  }
  static std::string default_of(const std::optional<at::Tensor>&) { return "None"; }
  template <class T, size_t n>
  static std::string default_of(const std::array<T, n>& list) {
    return default_of_list(list);
  }
  template <class T>
  static std::string default_of(const std::vector<T>& list) {
    return default_of_list(list);
  }
  static std::string default_of_list(const auto& list) {
    std::string all;
    for (const auto x : list) all += (all.empty() ? "" : ", ") + default_of(x);
    return "[" + all + "]";
  }

  std::string changed() { return c10::str("Tensor(", letter_++, "!)"); }

  void add(const std::string& type, const char* name, const std::string& value = "") {
    text += (text.empty() ? "" : ", ") + type + (*name == 0 ? "" : " ") + name;
    if (!value.empty()) text += "=" + value;
  }

  char letter_ = 'a';
};

}  // namespace fields

/// Returns arguments and their defaults as the text of a schema.
template <class Arguments>
std::string schema_of(const Arguments& defaults = {}) {
  fields::SchemaText visit;
  Arguments::fields(defaults, visit);
  return visit.text;
}

/// Returns the number of arguments of the struct `Arguments`.
template <class Arguments>
size_t count_of() {
  static const size_t count = [] {
    size_t field_count = 0;
    fields::Each visit{[&](const char*, const auto&) { ++field_count; }};
    const Arguments defaults{};
    Arguments::fields(defaults, visit);
    return field_count;
  }();
  return count;
}

/// Returns the position of the argument `name` in the schema.
template <class Arguments>
size_t index_of(const std::string& name) {
  size_t index = 0, position = count_of<Arguments>();
  fields::Each visit{[&](const char* each, const auto&) {
    if (each == name) position = index;
    ++index;
  }};
  const Arguments defaults{};
  Arguments::fields(defaults, visit);
  TORCH_INTERNAL_ASSERT(position < index, "no argument ", name);
  return position;
}

/// Puts the arguments of an operator, or its results, on the stack.
template <class Arguments>
void push_fields(torch::jit::Stack& stack, const Arguments& arguments) {
  fields::Each visit{[&](const char*, const auto& x) { stack.push_back(fields::to_value(x)); }};
  Arguments::fields(arguments, visit);
}

/// Reads the `count` arguments of an operator, or its results, which are at the end of the stack and stay
/// there.
template <class Arguments>
void read_fields(const torch::jit::Stack& stack, size_t count, Arguments& arguments) {
  const c10::IValue* next = stack.data() + stack.size() - count;
  fields::Each visit{[&](const char*, auto& x) { fields::from_value(*next++, x); }};
  Arguments::fields(arguments, visit);
}
template <class Arguments>
Arguments read_fields(const torch::jit::Stack& stack) {
  Arguments arguments{};
  read_fields(stack, count_of<Arguments>(), arguments);
  return arguments;
}

/// An operator that takes `Arguments` and returns `Results`, both structs with a function `fields`. It is
/// found once, by its name ("shoestring::op"), and called through PyTorch's dispatcher.
template <class Arguments, class Results>
class Operator {
 public:
  explicit Operator(const char* name) : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {
    TORCH_INTERNAL_ASSERT(handle_.schema().arguments().size() == count_of<Arguments>() &&
                              handle_.schema().returns().size() == count_of<Results>(),
                          name, ": the struct of its arguments or results does not fit its schema");
  }
  Results operator()(const Arguments& arguments) const {
    torch::jit::Stack stack;
    stack.reserve(count_of<Arguments>());
    push_fields(stack, arguments);
    handle_.callBoxed(stack);
    return read_fields<Results>(stack);
  }

 private:
  c10::OperatorHandle handle_;
};

/// Wraps a function that takes the arguments of its operator from the stack.
template <auto kFunction>
auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kFunction>();
}

/// Replaces undefined gradients by empty tensors with the dtype and device of `like`, which an operator can
/// return.
template <size_t n>
void fill_gradients(std::array<at::Tensor, n>& gradients, const at::Tensor& like) {
  for (at::Tensor& g : gradients) {
    if (!g.defined()) g = at::empty({0}, like.options());
  }
}

/// The results of an operator that returns one tensor.
struct TensorResult {
  at::Tensor tensor;
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("result", self.tensor);
  }
};

/// Saves a struct for backward in the context of an autograd node. PyTorch tracks its tensors, except for
/// tensors that the operator changes, since others may change them, too, before backward. The other members
/// become one value.
template <class Saved>
void save_fields(torch::autograd::AutogradContext* ctx, const Saved& saved);

/// Returns the struct that save_fields() saved. Its tensors have no other reference than those of autograd.
template <class Saved>
Saved saved_fields(torch::autograd::AutogradContext* ctx);

namespace fields {

struct Saver {
  void operator()(const char*, const at::Tensor& x) { tensors.push_back(x); }
  void operator()(const char*, const std::optional<at::Tensor>& x) {
    tensors.push_back(x ? *x : at::Tensor());
  }
  template <class T>
  void operator()(const char*, const T& x) {
    values.emplace_back(x);
  }
  template <class T, size_t n>
  void operator()(const char*, const std::array<T, n>& list) {
    // elements one by one, because PyTorch's compiled autograd does not support a list within a tuple
    for (const T& x : list) (*this)("", x);
  }
  template <class T>
  void required(const char* name, const T& x) {
    (*this)(name, x);
  }
  template <class T>
  void changed(const char*, const T& x) {
    values.emplace_back(x);
  }
  void keywords() {}
  /// Saves several members, whose names do not matter here.
  template <class... T>
  void each(const T&... x) {
    ((*this)("", x), ...);
  }
  /// Saves the fields of a struct if it is given.
  template <class T>
  void maybe(const std::optional<T>& item) {
    values.emplace_back(item.has_value());
    if (item) T::fields(*item, *this);
  }

  torch::autograd::variable_list tensors;
  std::vector<c10::IValue> values;
};

struct Restorer {
  void operator()(const char*, at::Tensor& x) { x = std::move(*tensor++); }
  void operator()(const char*, std::optional<at::Tensor>& x) {
    at::Tensor t = std::move(*tensor++);
    if (t.defined()) x = std::move(t);
  }
  template <class T>
  void operator()(const char*, T& x) {
    from_value(*value++, x);
  }
  template <class T, size_t n>
  void operator()(const char*, std::array<T, n>& list) {
    for (T& x : list) (*this)("", x);
  }
  template <class T>
  void required(const char* name, T& x) {
    (*this)(name, x);
  }
  template <class T>
  void changed(const char*, T& x) {
    from_value(*value++, x);
  }
  void keywords() {}
  template <class... T>
  void each(T&... x) {
    ((*this)("", x), ...);
  }
  template <class T>
  void maybe(std::optional<T>& item) {
    if ((value++)->toBool()) T::fields(item.emplace(), *this);
  }

  torch::autograd::variable_list::iterator tensor;
  const c10::IValue* value;
};

constexpr const char* kSaved = "saved";

}  // namespace fields

template <class Saved>
void save_fields(torch::autograd::AutogradContext* ctx, const Saved& saved) {
  fields::Saver visit;
  Saved::fields(saved, visit);
  ctx->save_for_backward(std::move(visit.tensors));
  ctx->saved_data[fields::kSaved] = c10::ivalue::Tuple::create(std::move(visit.values));
}

template <class Saved>
Saved saved_fields(torch::autograd::AutogradContext* ctx) {
  torch::autograd::variable_list tensors = ctx->get_saved_variables();
  const auto& values = ctx->saved_data[fields::kSaved].toTupleRef().elements();
  Saved saved{};
  fields::Restorer visit{tensors.begin(), values.begin()};
  Saved::fields(saved, visit);
  return saved;
}

}  // namespace shoestring
