// tokenway-floor: one JSON document on stdout.
//
//   build   nvcc -std=c++20 -O3 -arch=sm_90 bench/floor/*.cu -o tokenway-floor   (CMake builds it beside the library)
//   run     tokenway-floor --gpus 4 --tokens 1,8,128 --row-bytes 14336,14416 --repeat 30
//
// Tokens are rows that leave each GPU, dealt to the others in turn; with --gpus 2, which is the default, all go to the
// one peer. Times are microseconds per kernel, best and median over `repeat` replays of a graph, the slowest GPU's;
// bandwidths are of a GPU, per direction, "ways" says of how many that send at the same time. Ends with 1 and a
// sentence on stderr where it cannot measure, with 2 for bad arguments.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "floor.h"

namespace {

struct Options {
  int gpus = 2;
  std::vector<int> tokens = {1, 8, 32, 128, 512};
  std::vector<int> row_bytes = {14336};
  int repeat = 20;
};

[[noreturn]] void refuse(const std::string& sentence) {
  std::fprintf(stderr, "tokenway-floor: %s\n", sentence.c_str());
  std::exit(2);
}

int number(const std::string& name, const std::string& text, int most) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 1 || value > most) {
    refuse(name + ": '" + text + "'; allowed 1.." + std::to_string(most));
  }
  return static_cast<int>(value);
}

std::vector<int> numbers(const std::string& name, const std::string& text, int most) {
  std::vector<int> found;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const int value = number(name, text.substr(at, comma - at), most);
    if (std::find(found.begin(), found.end(), value) == found.end()) found.push_back(value);
    at = comma + 1;
  }
  return found;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--help") {
      std::printf("usage: tokenway-floor [--gpus N] [--tokens T,...] [--row-bytes R,...] [--repeat N]\n");
      std::exit(0);
    }
    if (i + 1 == argc) refuse(name + ": no value, or no such option");
    if (name == "--tokens") {
      options.tokens = numbers(name, argv[i + 1], 65536);
    } else if (name == "--row-bytes") {
      options.row_bytes = numbers(name, argv[i + 1], 1 << 20);
    } else if (name == "--gpus") {
      options.gpus = number(name, argv[i + 1], kMaxGpus);
      if (options.gpus < 2) refuse("--gpus: 1; allowed 2.." + std::to_string(kMaxGpus));
    } else if (name == "--repeat") {
      options.repeat = number(name, argv[i + 1], 10000);
    } else {
      refuse(name + ": no such option");
    }
  }
  for (const int bytes : options.row_bytes) {
    if (bytes % 16 != 0) refuse("--row-bytes: " + std::to_string(bytes) + "; must be a multiple of 16");
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  // A kernel loaded while another one waits for its peer would wait for that one.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  Mesh mesh(options.gpus, *std::max_element(options.tokens.begin(), options.tokens.end()),
            *std::max_element(options.row_bytes.begin(), options.row_bytes.end()));
  int driver = 0, runtime = 0;
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  std::printf("{\n \"program\": \"tokenway-floor\",\n \"schema\": 1,\n \"device\": \"%s\",\n \"devices\": [%d",
              mesh.properties().name, mesh.device(0));
  for (int i = 1; i < mesh.gpus(); ++i) std::printf(", %d", mesh.device(i));
  std::printf("],\n \"gpus\": %d,\n", mesh.gpus());
  std::printf(" \"sms\": %d,\n \"driver\": %d,\n \"runtime\": %d,\n \"repeat\": %d,\n",
              mesh.properties().multiProcessorCount, driver, runtime, options.repeat);
  print_flags(mesh, options.repeat);
  print_ceilings(mesh, std::min(options.repeat, 10));
  print_exchanges(mesh, options.tokens, options.row_bytes, options.repeat);
  std::printf("}\n");
  return 0;
}
