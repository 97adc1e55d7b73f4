#include <ATen/ATen.h>
#include <shoestring/files/safetensors.h>
#include <sys/resource.h>

#include <csignal>

#include "files/safetensors_files.h"

using at::Tensor;
using shoestring::SafetensorsFile;
using shoestring::TensorDict;

TEST_CASE("safetensors refuses bad and hostile files in words", "[safetensors]") {
  const auto tensor = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"") + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape +
           R"(,"data_offsets":)" + offsets + "}";
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
      {file(R"({"a":{"stride":[1]}})", 0),
       "expected the fields dtype, shape and data_offsets, received \"stride\""},
      {file(R"({"a":{"dtype":4}})", 0), "tensor \"a\": dtype: unexpected a number"},
      {file(R"({"a":{"shape":{}}})", 0), "tensor \"a\": shape: unexpected an object"},
      {file(R"({"a":{"shape":null}})", 0), "tensor \"a\": shape: unexpected null"},
      {file("{" + tensor("a", "F4", "[2]", "[0,1]") + "}", 1),
       "tensor \"a\": dtype: PyTorch has no dtype \"F4\""},
      {file("{" + tensor("a", "F32", "[-2]", "[0,8]") + "}", 8), "tensor \"a\": shape: unexpected -2"},
      {file("{" + tensor("a", "F32", "[2.0]", "[0,8]") + "}", 8), "tensor \"a\": shape: unexpected \"2.0\""},
      {file("{" + tensor("a", "F32", "[9223372036854775808]", "[0,8]") + "}", 8),
       "9223372036854775808 is too large"},
      {file("{" + tensor("a", "F32", "[99999999999999999999]", "[0,8]") + "}", 8),
       "unexpected \"99999999999999999999\""},
      {file("{" + tensor("a", "F32", "[4294967296,4294967296]", "[0,0]") + "}", 0), "overflows 64 bits"},
      {file("{" + tensor("a", "U8", "[0,4294967296,4294967296]", "[0,0]") + "}", 0), "overflows 64 bits"},
      {file("{" + tensor("a", "F32", many.c_str(), "[0,4]") + "}", 4),
       "tensor \"a\": shape: more than 64 numbers"},
      {file("{" + tensor("a", "F32", "[2]", "[0,7]") + "}", 7),
       "tensor \"a\": data_offsets: expected 8 bytes for shape [2] of Float, received 7"},
      {file("{" + tensor("a", "F32", "[0]", "[0,4]") + "}", 4),
       "expected 0 bytes for shape [0] of Float, received 4"},
      {file("{" + tensor("a", "F32", "[2]", "[8,0]") + "}", 8), "expected [begin, end], received [8, 0]"},
      {file("{" + tensor("a", "F32", "[2]", "[0]") + "}", 8), "expected [begin, end], received [0]"},
      {file("{" + tensor("a", "F32", "[2]", "[0,8,8]") + "}", 8),
       "expected [begin, end], received [0, 8, 8]"},
      {file("{" + tensor("a", "F32", "[2]", "[800,808]") + "}", 8),
       "tensor \"a\": expected its bytes to begin at 0, where the one before ends, received 800: there is a "
       "hole"},
      {file("{" + a + "," + tensor("b", "F32", "[1]", "[4,8]") + "}", 8),
       "tensor \"b\": expected its bytes to begin at 8, where the one before ends, received 4: they overlap"},
      {file("{" + a + "," + tensor("b", "F32", "[2]", "[0,8]") + "}", 8), "received 0: they overlap"},
      {file("{" + a + "," + tensor("b", "F32", "[1]", "[12,16]") + "}", 16), "received 12: there is a hole"},
      {file("{" + a + "," + tensor("a", "F32", "[2]", "[8,16]") + "}", 16),
       "header: the name \"a\" appears twice"},
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

TEST_CASE("names in messages cannot act on a terminal or hide", "[safetensors]") {
  Folder folder;
  const std::string path = folder / "model.safetensors";
  TensorDict tensors;
  tensors.insert("a", at::ones({1}));
  shoestring::save_safetensors(path, tensors);
  const shoestring::SafetensorsFile file(path);
  const auto received = [&](const std::string& name) { return message([&] { file.entry(name); }); };
  expect(received("käse \u6f22 \U0001f600"), "no tensor \"käse \u6f22 \U0001f600\"");
  expect(received("a\u202eb\u200b\x1b[2J\x7f\u009b1m\U000e0041"),
         "no tensor \"a\\u202eb\\u200b\\u001b[2J\\u007f\\u009b1m\\U000e0041\"");
  expect(received("\xe2\x80"), "no tensor \"\ufffd");
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

  // A limit on the file size acts like a full disk: the write fails before the file is complete.
  struct rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const struct rlimit limit{8192, old.rlim_max};
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
