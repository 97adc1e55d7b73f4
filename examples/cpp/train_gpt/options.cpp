#include "options.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <variant>

namespace {

using Member = std::variant<std::string Options::*, int64_t Options::*, double Options::*, bool Options::*>;

struct Flag {
  const char* name;
  Member member;
  double least;  // of a number
  bool decides;  // the result changes with it
  const char* help;
};

const Flag kFlags[] = {
    {"data", &Options::data, 0, false, "token file that `shoestring tokenize` wrote"},
    {"out", &Options::out, 0, false, "folder for checkpoints and the trained model"},
    {"layers", &Options::layers, 1, true, "decoder layers"},
    {"hidden", &Options::hidden, 2, true, "width of the model"},
    {"heads", &Options::heads, 1, true, "attention heads"},
    {"kv-heads", &Options::kv_heads, 1, true, "heads of keys and values; --heads is a multiple of it"},
    {"steps", &Options::steps, 1, true, "optimizer steps"},
    {"batch-size", &Options::batch_size, 1, true, "sequences in a micro-batch"},
    {"seq-len", &Options::seq_len, 1, true, "tokens in a sequence"},
    {"accumulate", &Options::accumulate, 1, true, "micro-batches in a step"},
    {"lr", &Options::lr, 0, true, "highest learning rate; cosine decay to 0"},
    {"warmup", &Options::warmup, 0, true, "steps of linear warm-up"},
    {"weight-decay", &Options::weight_decay, 0, true, "decay of the matrices"},
    {"clip", &Options::clip, 0, true, "largest gradient norm; 0: no clipping"},
    {"seed", &Options::seed, 0, true, "of the weights and the order of the data"},
    {"checkpoint-every", &Options::checkpoint_every, 1, false, "steps between checkpoints; the last two are kept"},
    {"threads", &Options::threads, 0, false, "0: as many as PyTorch chooses; bits can depend on the number"},
    {"resume", &Options::resume, 0, false, "continue the run in --out"},
    {"plain", &Options::plain, 0, true, "LibTorch's own loss and AdamW, for comparison"},
};

template <class T>
T parse_number(const Flag& flag, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool number = error == std::errc() && end == text.data() + text.size() && std::isfinite(double(value));
  if (!number || value < flag.least) {
    char least[32];
    std::snprintf(least, sizeof least, "%g", flag.least);
    throw InputError("--" + std::string(flag.name) + ": expected " +
                     (std::is_integral_v<T> ? "a whole number" : "a number") + ", at least " + least + ", received '" +
                     text + "'");
  }
  return value;
}

void set(Options& options, const Flag& flag, const std::string& text) {
  if (const auto* s = std::get_if<std::string Options::*>(&flag.member)) options.** s = text;
  if (const auto* i = std::get_if<int64_t Options::*>(&flag.member)) options.** i = parse_number<int64_t>(flag, text);
  if (const auto* d = std::get_if<double Options::*>(&flag.member)) options.** d = parse_number<double>(flag, text);
}

std::string get(const Options& options, const Flag& flag) {
  if (const auto* s = std::get_if<std::string Options::*>(&flag.member)) return options.**s;
  if (const auto* i = std::get_if<int64_t Options::*>(&flag.member)) return std::to_string(options.**i);
  if (const auto* b = std::get_if<bool Options::*>(&flag.member)) return options.**b ? "yes" : "no";
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", options.*std::get<double Options::*>(flag.member));
  return text;
}

void print_help() {
  std::printf("train_gpt --data FILE --out FOLDER [options]: trains a Llama-style model from scratch\n");
  for (const Flag& flag : kFlags) {
    const std::string value = get({}, flag);
    const bool shown = !value.empty() && value != "no";
    std::printf("  --%-18s%s%s%s%s\n", flag.name, flag.help, shown ? " (" : "", shown ? value.c_str() : "",
                shown ? ")" : "");
  }
}

void check(const Options& o) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw InputError(what);
  };
  require(!o.data.empty(), "--data: missing; give the token file that `shoestring tokenize` wrote");
  require(!o.out.empty(), "--out: missing; give a folder for checkpoints and the trained model");
  require(o.hidden % (2 * o.heads) == 0, "--hidden: expected a multiple of twice --heads, " +
                                             std::to_string(2 * o.heads) + ", received " + std::to_string(o.hidden));
  require(o.heads % o.kv_heads == 0, "--kv-heads: expected a divisor of --heads, " + std::to_string(o.heads) +
                                         ", received " + std::to_string(o.kv_heads));
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      print_help();
      std::exit(0);
    }
    const Flag* found = nullptr;
    for (const Flag& flag : kFlags) {
      if (word == "--" + std::string(flag.name)) found = &flag;
    }
    if (!found) throw InputError("'" + word + "' is no option; see --help");
    if (const auto* flag = std::get_if<bool Options::*>(&found->member)) {
      options.** flag = true;
    } else if (i + 1 < argc) {
      set(options, *found, argv[++i]);
    } else {
      throw InputError(word + ": expected a value after it");
    }
  }
  check(options);
  return options;
}

std::map<std::string, std::string> deciding_options(const Options& options) {
  std::map<std::string, std::string> values;
  for (const Flag& flag : kFlags) {
    if (flag.decides) values[flag.name] = get(options, flag);
  }
  return values;
}
