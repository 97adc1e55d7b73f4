#include <ATen/ATen.h>
#include <dirent.h>
#include <shoestring/safetensors.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "catch.h"

using at::Tensor;
using shoestring::SafetensorsFile;
using shoestring::TensorDict;

namespace {

// A temporary folder without subfolders. POSIX, not std::filesystem: LibTorch exports an older copy of that, which
// crashes.
struct Folder {
  Folder() : path(::mkdtemp(name)) {}
  ~Folder() {
    for (const auto& file : files()) std::remove((path + "/" + file).c_str());
    ::rmdir(path.c_str());
  }
  std::string operator/(const std::string& file) const { return path + "/" + file; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    DIR* dir = ::opendir(path.c_str());
    while (const dirent* entry = ::readdir(dir)) {
      if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    }
    ::closedir(dir);
    return names;
  }
  char name[32] = "/tmp/shoestring-XXXXXX";
  std::string path;
};

void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

std::string file(const std::string& header, size_t data) {
  return with_length(header.size(), header + std::string(data, '\0'));
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

template <class Call>
std::string message(Call call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "(no error)";
}

void expect(const std::string& received, const std::string& part) {
  CAPTURE(received, part);
  CHECK(received.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("safetensors keeps every dtype, shape and byte", "[safetensors]") {
  Folder folder;
  TensorDict tensors;
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar,
                     at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kFloat8_e4m3fn,
                     at::kFloat8_e5m2, at::kFloat8_e8m0fnu}) {
    const std::string name = c10::toString(dtype);
    const int64_t width = c10::elementSize(dtype);
    const auto bytes = at::randint(dtype == at::kBool ? 2 : 256, {3, 5 * width}, at::kByte);
    tensors.insert(name, bytes.view(dtype));
    tensors.insert(name + ".scalar", bytes.view({-1}).narrow(0, 0, width).clone().view(dtype).view({}));
    tensors.insert(name + ".empty", at::empty({2, 0, 7}, dtype));
  }
  const std::string path = folder / "all.safetensors";
  shoestring::save_safetensors(path, tensors, {{"format", "pt"}, {"note", "a \"quoted\"\nline: ü"}});

  SafetensorsFile opened(path);
  CHECK(opened.metadata().at("note") == "a \"quoted\"\nline: ü");
  CHECK(opened.entries().size() == tensors.size());
  CHECK_FALSE(opened.contains("nothing"));
  for (const auto& item : tensors) {
    CAPTURE(item.key());
    CHECK(same_bytes(opened.load(item.key()), item.value()));
    Tensor into = at::empty_like(item.value());
    opened.load_into(item.key(), into);
    CHECK(same_bytes(into, item.value()));
  }
  TensorDict loaded = shoestring::load_safetensors(path);
  CHECK(loaded.size() == tensors.size());
  CHECK(loaded[0].key() == "UInt64");  // the widest first, whatever the order given: every tensor is aligned
  CHECK(folder.files().size() == 1);

  shoestring::save_safetensors(path, TensorDict());
  CHECK(read(path) == file("{}      ", 0));
  CHECK(shoestring::load_safetensors(path).is_empty());
}

TEST_CASE("save_safetensors writes the bytes of the Python package", "[safetensors]") {
  // safetensors.torch.save of the tensors below, version 0.8.0.
  const std::string header = R"({"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
                             R"("h":{"dtype":"BF16","shape":[1,1],"data_offsets":[16,18]},)"
                             R"("e":{"dtype":"F16","shape":[0,3],"data_offsets":[18,18]},)"
                             R"("a":{"dtype":"BOOL","shape":[3],"data_offsets":[18,21]}}   )";
  const char data[] =
      "\x07\0\0\0\0\0\0\0"
      "\0\0\x80\x3f\0\0\x20\xc0"
      "\0\x3f"
      "\x01\0\x01";
  Folder folder;
  TensorDict tensors;
  tensors.insert("b", at::tensor({1.0f, -2.5f}));
  tensors.insert("a", at::tensor({1, 0, 1}).to(at::kBool));
  tensors.insert("s", at::scalar_tensor(7, at::kLong));
  tensors.insert("e", at::empty({0, 3}, at::kHalf));
  tensors.insert("h", at::full({1, 1}, 0.5, at::kBFloat16));
  shoestring::save_safetensors(folder / "golden", tensors, {{"format", "pt"}});
  CHECK(read(folder / "golden") == with_length(header.size(), header + std::string(data, sizeof data - 1)));
}

TEST_CASE("safetensors: views are saved as they look, parameters are loaded in place", "[safetensors]") {
  Folder folder;
  TensorDict tensors;
  const Tensor base = at::arange(12, at::kFloat).view({3, 4});
  tensors.insert("transposed", base.t());
  tensors.insert("negated", at::_neg_view(base));
  tensors.insert("weight", at::ones({2}).requires_grad_());
  shoestring::save_safetensors(folder / "views", tensors);
  SafetensorsFile opened(folder / "views");
  CHECK(opened.load("transposed").equal(base.t()));
  CHECK(opened.load("negated").equal(-base));

  Tensor strided = at::zeros({3, 4}).t(), parameter = at::zeros({2}).requires_grad_();
  opened.load_into("transposed", strided);
  CHECK(strided.equal(base.t()));
  opened.load_into("weight", parameter);
  CHECK(parameter.equal(at::ones({2})));
  CHECK(parameter.requires_grad());
  expect(message([&] { opened.load_into("weight", at::zeros({3})); }),
         "tensor \"weight\": expected shape [3] of Float, the file has [2] of Float");
  expect(message([&] { opened.load("bias"); }), "there is no tensor \"bias\"");
}

TEST_CASE("safetensors refuses bad and hostile files in words", "[safetensors]") {
  const auto tensor = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"") + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}";
  };
  const std::string a = tensor("a", "F32", "[2]", "[0,8]");
  const std::string huge(1'000'000, '[');
  std::string many = "[1";
  for (int i = 0; i < 64; ++i) many += ",1";
  many += "]";
  struct Case {
    std::string bytes, expected;
  };
  const Case cases[] = {
      {"", "expected at least the 8 bytes of the header's length, received a file of 0"},
      {"1234567", "received a file of 7"},
      {with_length(UINT64_MAX, "{}"), "received the length 18446744073709551615"},
      {with_length(100'000'001, "{}"), "expected a header of at most 100000000 bytes"},
      {with_length(50, "{}"), "the header's length is 50 bytes, but only 2 follow: the file is truncated"},
      {file("{" + a + "}", 4), "the header describes 8 bytes of tensors, the file holds 4: it is truncated"},
      {file("{" + a + "}", 9), "the header describes 8 bytes of tensors, the file holds 9"},
      {file("", 0), "not valid JSON at its byte"},
      {file("{" + a, 8), "not valid JSON at its byte"},
      {file("{" + a + "} x", 8), "not valid JSON at its byte"},
      {file("{\"\xff\":1}", 0), "not valid JSON at its byte"},
      {file("[]", 0), "header: expected an object, received a list"},
      {file(huge, 0), "header: expected an object, received a list"},
      {file("{\"a\":" + huge, 0), "tensor \"a\": expected an object, received a list"},
      {file(R"({"a":{"dtype":"F32","shape":[)" + huge, 0), "tensor \"a\": shape: unexpected a list"},
      {file(R"({"a":5})", 0), "tensor \"a\": expected an object, received a number"},
      {file(R"({"a":{}})", 0), "tensor \"a\": the field dtype is missing"},
      {file(R"({"a":{"dtype":"F32","shape":[2]}})", 0), "tensor \"a\": the field data_offsets is missing"},
      {file(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0), "tensor \"a\": the field dtype appears twice"},
      {file(R"({"a":{"stride":[1]}})", 0), "expected the fields dtype, shape and data_offsets, received \"stride\""},
      {file(R"({"a":{"dtype":4}})", 0), "tensor \"a\": dtype: unexpected a number"},
      {file(R"({"a":{"shape":{}}})", 0), "tensor \"a\": shape: unexpected an object"},
      {file(R"({"a":{"shape":null}})", 0), "tensor \"a\": shape: unexpected null"},
      {file("{" + tensor("a", "F4", "[2]", "[0,1]") + "}", 1), "tensor \"a\": dtype: PyTorch has none that is \"F4\""},
      {file("{" + tensor("a", "F32", "[-2]", "[0,8]") + "}", 8), "tensor \"a\": shape: unexpected -2"},
      {file("{" + tensor("a", "F32", "[2.0]", "[0,8]") + "}", 8), "tensor \"a\": shape: unexpected \"2.0\""},
      {file("{" + tensor("a", "F32", "[9223372036854775808]", "[0,8]") + "}", 8), "9223372036854775808 is too large"},
      {file("{" + tensor("a", "F32", "[99999999999999999999]", "[0,8]") + "}", 8),
       "unexpected \"99999999999999999999\""},
      {file("{" + tensor("a", "F32", "[4294967296,4294967296]", "[0,0]") + "}", 0), "overflows 64 bits"},
      {file("{" + tensor("a", "U8", "[0,4294967296,4294967296]", "[0,0]") + "}", 0), "overflows 64 bits"},
      {file("{" + tensor("a", "F32", many.c_str(), "[0,4]") + "}", 4), "tensor \"a\": shape: more than 64 numbers"},
      {file("{" + tensor("a", "F32", "[2]", "[0,7]") + "}", 7),
       "tensor \"a\": data_offsets: expected 8 bytes for shape [2] of Float, received 7"},
      {file("{" + tensor("a", "F32", "[0]", "[0,4]") + "}", 4), "expected 0 bytes for shape [0] of Float, received 4"},
      {file("{" + tensor("a", "F32", "[2]", "[8,0]") + "}", 8), "expected [begin, end], received [8, 0]"},
      {file("{" + tensor("a", "F32", "[2]", "[0]") + "}", 8), "expected [begin, end], received [0]"},
      {file("{" + tensor("a", "F32", "[2]", "[0,8,8]") + "}", 8), "expected [begin, end], received [0, 8, 8]"},
      {file("{" + tensor("a", "F32", "[2]", "[800,808]") + "}", 8),
       "tensor \"a\": expected its bytes to begin at 0, where the one before ends, received 800: there is a "
       "hole"},
      {file("{" + a + "," + tensor("b", "F32", "[1]", "[4,8]") + "}", 8),
       "tensor \"b\": expected its bytes to begin at 8, where the one before ends, received 4: they overlap"},
      {file("{" + a + "," + tensor("b", "F32", "[2]", "[0,8]") + "}", 8), "received 0: they overlap"},
      {file("{" + a + "," + tensor("b", "F32", "[1]", "[12,16]") + "}", 16), "received 12: there is a hole"},
      {file("{" + a + "," + tensor("a", "F32", "[2]", "[8,16]") + "}", 16), "header: the name \"a\" appears twice"},
      {file(R"({"__metadata__":{"k":"1","k":"2"}})", 0), "__metadata__: the key \"k\" appears twice"},
      {file(R"({"__metadata__":{"k":1}})", 0), "__metadata__: expected strings, received a number"},
      {file(R"({"__metadata__":{"k":{}}})", 0), "__metadata__: expected strings, received an object"},
      {file(R"({"x\ny)" + std::string(500, 'z') + R"(":5})", 0), "tensor \"x\\nyzzz"},
  };
  Folder folder;
  const std::string path = folder / "bad.safetensors";
  for (const auto& [bytes, expected] : cases) {
    write(path, bytes);
    const std::string received = message([&] { SafetensorsFile{path}; });
    expect(received, expected);
    CHECK(received.rfind("safetensors: " + path + ": ", 0) == 0);
    CHECK(received.find('\n') == std::string::npos);
    CHECK(received.size() < 400);
  }

  write(path, file("{" + tensor("a", "BOOL", "[1]", "[0,1]") + "}", 0) + "\x02");
  expect(message([&] { SafetensorsFile(path).load("a"); }), "expected bytes 0 and 1 for BOOL");
  expect(message([&] { SafetensorsFile(folder / "missing"); }), "cannot open: No such file");
  expect(message([&] { SafetensorsFile(folder.path); }), "expected a regular file");
}

TEST_CASE("load_safetensors reads a model directory, in one file or in shards", "[safetensors]") {
  Folder folder;
  const auto refused = [&] { return message([&] { shoestring::load_safetensors(folder.path); }); };
  expect(refused(), "expected model.safetensors or model.safetensors.index.json in this folder");

  TensorDict first, second;
  first.insert("a", at::ones({2}));
  first.insert("unlisted", at::ones({1}));
  second.insert("b", at::zeros({3}));
  shoestring::save_safetensors(folder / "model-1.safetensors", first);
  shoestring::save_safetensors(folder / "model-2.safetensors", second);
  const std::string index = folder / "model.safetensors.index.json";
  const auto map = [&](const std::string& b) {
    write(index, R"({"metadata":{},"weight_map":{"a":"model-1.safetensors","b":)" + b + "}}");
  };
  map(R"("model-2.safetensors")");
  TensorDict loaded = shoestring::load_safetensors(folder.path);
  CHECK(loaded.keys() == std::vector<std::string>{"a", "b"});
  CHECK(loaded["b"].equal(at::zeros({3})));

  map(R"("model-1.safetensors")");
  expect(refused(), "model-1.safetensors: there is no tensor \"b\"");
  map(R"("model-3.safetensors")");
  expect(refused(), "model-3.safetensors: cannot open: No such file");
  map(R"("../model-2.safetensors")");
  expect(refused(), "tensor \"b\": expected a file in the same folder, received \"../model-2");
  map("5");
  expect(refused(), "tensor \"b\": expected the name of a file");
  write(index, R"({"weight_map":[]})");
  expect(refused(), "expected an object with the object weight_map");
  write(index, "{");
  expect(refused(), "model.safetensors.index.json: not valid JSON");

  std::rename((folder / "model-2.safetensors").c_str(), (folder / "model.safetensors").c_str());
  CHECK(shoestring::load_safetensors(folder.path).keys() == std::vector<std::string>{"b"});
}

TEST_CASE("a save that fails leaves the old file and nothing else", "[safetensors]") {
  Folder folder;
  const std::string path = folder / "model.safetensors";
  TensorDict tensors;
  tensors.insert("a", at::ones({4096}));
  shoestring::save_safetensors(path, tensors);
  const std::string before = read(path);
  const auto refused = [&](const TensorDict& t, const shoestring::Metadata& m = {}) {
    const std::string received = message([&] { shoestring::save_safetensors(path, t, m); });
    CHECK(read(path) == before);
    CHECK(folder.files().size() == 1);
    return received;
  };

  // A limit on the file's size stands in for a full disk: the write fails half-way.
  struct rlimit old {};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const struct rlimit limit { 8192, old.rlim_max };
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const std::string received = message([&] { shoestring::save_safetensors(path, tensors); });
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  expect(received, path + ": cannot write: File too large");
  CHECK(read(path) == before);
  CHECK(folder.files().size() == 1);

  TensorDict sparse, undefined, reserved, latin, quantized;
  sparse.insert("s", at::eye(3).to_sparse());
  undefined.insert("u", Tensor());
  reserved.insert("__metadata__", at::ones({1}));
  latin.insert("\xff", at::ones({1}));
  quantized.insert("q", at::empty({1}, at::kComplexDouble));
  expect(refused(sparse), "tensor \"s\": expected a dense tensor, received Sparse");
  expect(refused(undefined), "tensor \"u\": expected a dense tensor, received an undefined one");
  expect(refused(reserved), "a tensor cannot be called __metadata__");
  expect(refused(latin), "expected names and metadata in UTF-8");
  expect(refused(tensors, {{"k", "\xff"}}), "expected names and metadata in UTF-8");
  expect(refused(quantized), "tensor \"q\": safetensors has no dtype for ComplexDouble");
  expect(message([&] { shoestring::save_safetensors(folder / "no/such/x", tensors); }),
         "no/such/x: cannot create the file: No such file or directory");
}
