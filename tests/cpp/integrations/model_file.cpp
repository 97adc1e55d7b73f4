// Loads models of linear layers and saves them again, for tests/python/integrations/test_model_files.py:
//
//   model_file FROM TO QUANTIZE BLOCK_SIZE NESTED DTYPE LAYERS [FROM ...]
//
// FROM is a file or directory for load_model, and TO is a directory for save_model. QUANTIZE, BLOCK_SIZE and
// NESTED ("1" for yes) are options of load_model. DTYPE is "bf16", or "file" for the file's dtype. LAYERS is
// "name,in,out,bias;...", where names have no dots.

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include <shoestring/integrations/model_files.h>
#include <shoestring/nn.h>

namespace model_file {

namespace {

using shoestring::nn::AdaptableLinear;
using shoestring::nn::AdaptableLinearOptions;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

struct Model : torch::nn::Module {
  explicit Model(const std::string& layers) {
    for (const auto& layer : split(layers, ';')) {
      const auto field = split(layer, ',');
      const auto options = AdaptableLinearOptions(std::stoll(field[1]), std::stoll(field[2]))
                               .bias(field[3] == "1")
                               .placeholder(true);
      register_module(field[0], AdaptableLinear(options));
    }
  }
};

void run(char** a) {
  Model model(a[6]);
  auto options = shoestring::LoadOptions()
                     .quantize(a[2])
                     .block_size(std::stoll(a[3]))
                     .double_quant(std::string(a[4]) == "1");
  if (std::string(a[5]) == "bf16") options.dtype(at::kBFloat16);
  shoestring::load_model(model, a[0], options);
  shoestring::save_model(model, a[1]);
}

}  // namespace

int program(int argc, char** argv) {
  if (argc < 8 || argc % 7 != 1) return 2;
  try {
    for (char** a = argv + 1; a < argv + argc; a += 7) run(a);
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}

}  // namespace model_file
