// tokenway-floor: one JSON document on stdout.
//
//   build   nvcc -std=c++20 -O3 -arch=sm_90 bench/floor/*.cu -o tokenway-floor   (CMake builds it beside the library)
//   run     tokenway-floor --tokens 1,8,128 --row-bytes 14336,14416 --repeat 30
//
// Times are microseconds per kernel, best and median over `repeat` replays of a graph, the slower GPU's; bandwidths are
// per direction. Ends with 1 and a sentence on stderr where it cannot measure, with 2 for bad arguments.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "floor.h"

namespace {

struct Options {
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
      std::printf("usage: tokenway-floor [--tokens T,...] [--row-bytes R,...] [--repeat N]\n");
      std::exit(0);
    }
    if (i + 1 == argc) refuse(name + ": no value, or no such option");
    if (name == "--tokens") {
      options.tokens = numbers(name, argv[i + 1], 65536);
    } else if (name == "--row-bytes") {
      options.row_bytes = numbers(name, argv[i + 1], 1 << 20);
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
  Pair pair(*std::max_element(options.tokens.begin(), options.tokens.end()),
            *std::max_element(options.row_bytes.begin(), options.row_bytes.end()));
  int driver = 0, runtime = 0;
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  std::printf("{\n \"program\": \"tokenway-floor\",\n \"schema\": 1,\n \"device\": \"%s\",\n \"devices\": [%d, %d],\n",
              pair.properties().name, pair.device(0), pair.device(1));
  std::printf(" \"sms\": %d,\n \"driver\": %d,\n \"runtime\": %d,\n \"repeat\": %d,\n",
              pair.properties().multiProcessorCount, driver, runtime, options.repeat);
  print_flags(pair, options.repeat);
  print_ceilings(pair, std::min(options.repeat, 10));
  print_exchanges(pair, options.tokens, options.row_bytes, options.repeat);
  std::printf("}\n");
  return 0;
}
