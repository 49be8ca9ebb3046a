#include "pool-manager/cli/output.h"

#include <algorithm>

namespace gpupool::cli {

Words withOutput(Words words) {
  std::replace(words.begin(), words.end(), std::string("-o"), std::string("--output"));
  return words;
}

void check(Output& output) {
  if (output.form != "table" && output.form != "wide" && output.form != "json")
    throw options::OptionError("--output: '" + output.form + "' is not table, wide or json");
  output.json = output.json || output.form == "json";
}

}  // namespace gpupool::cli
