// Checks that loading the library registers its operators, in a program that references no symbol of the
// library.

#include <cstdio>

#include <ATen/core/dispatch/Dispatcher.h>

int main() {
  const bool found =
      c10::Dispatcher::singleton().findSchema({"shoestring::linear_cross_entropy", ""}).has_value();
  std::printf("%s operators are registered in a program linked with --as-needed\n", found ? "ok" : "not ok");
  return !found;
}
