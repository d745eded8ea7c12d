// What the wrapper of every package includes, compiled once for all of them (see hastened_inductor.py).
//
// AOTInductor finds out by std::regex whether a device is called "cpu" or "cuda:0". Compiling that takes a compiler as
// long as all else in a wrapper, so here a device's name is taken apart by hand.

#include <regex>  // before its names are others

#include <array>
#include <string>

namespace std {

struct eagle31_match {
  string text;
  bool matched = false;
  const string& str() const { return text; }
};

using eagle31_matches = array<eagle31_match, 4>;

struct eagle31_device_pattern {
  explicit eagle31_device_pattern(const char*) {}
};

// As "(cpu|cuda|xpu|mps)(:([0-9]+))?" does; names that are no device's the caller refuses.
inline bool eagle31_match_device(const string& device, eagle31_matches& groups, const eagle31_device_pattern&) {
  const auto colon = device.find(':');
  groups[1] = {device.substr(0, colon), true};
  if (colon == string::npos) return true;
  groups[3] = {device.substr(colon + 1), true};
  return !groups[3].text.empty() && groups[3].text.find_first_not_of("0123456789") == string::npos;
}

}  // namespace std

#define regex eagle31_device_pattern
#define smatch eagle31_matches
#define regex_match eagle31_match_device
#include <torch/csrc/inductor/aoti_runtime/model_base.h>
#undef regex
#undef smatch
#undef regex_match

#include <torch/csrc/inductor/aoti_include/cpu.h>
#include <torch/csrc/inductor/aoti_runtime/interface.h>
#include <torch/csrc/inductor/aoti_runtime/model_container.h>

#include <iostream>
#include <unordered_map>
#include <vector>
