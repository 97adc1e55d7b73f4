// The programs that Python tests run, in one executable, since each program costs the same headers and the
// same link:
//
//   programs NAME ARGUMENT ...

#include <cstdio>
#include <map>
#include <string_view>

using Program = int(int argc, char** argv);

namespace adapter_file {
Program program;
}
namespace averages_file {
Program program;
}
namespace crash_saves {
Program program;
}
namespace grad_scaler_file {
Program program;
}
namespace layer_file {
Program program;
}
namespace model_file {
Program program;
}
namespace optimizer_file {
Program program;
}
namespace targets_file {
Program program;
}
namespace training_file {
Program program;
}

int main(int argc, char** argv) {
  static const std::map<std::string_view, Program*> programs{
      {"adapter_file", adapter_file::program},     {"averages_file", averages_file::program},
      {"crash_saves", crash_saves::program},       {"grad_scaler_file", grad_scaler_file::program},
      {"layer_file", layer_file::program},         {"model_file", model_file::program},
      {"optimizer_file", optimizer_file::program}, {"targets_file", targets_file::program},
      {"training_file", training_file::program}};
  const auto found = argc > 1 ? programs.find(argv[1]) : programs.end();
  if (found != programs.end()) return found->second(argc - 1, argv + 1);
  std::fprintf(stderr, "programs: expected the name of a program and its arguments; the programs are:\n");
  for (const auto& [name, program] : programs) std::fprintf(stderr, "  %s\n", name.data());
  return 2;
}
