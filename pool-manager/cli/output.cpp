#include "pool-manager/cli/output.h"

#include <algorithm>
#include <ctime>
#include <iostream>

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

std::string timeText(uint64_t ms) {
  const auto seconds = static_cast<std::time_t>(ms / 1000);
  std::tm local{};
  localtime_r(&seconds, &local);
  char text[32];
  std::strftime(text, sizeof text, "%F %T", &local);
  return text;
}

void printJson(const nlohmann::json& value) {
  std::cout << value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

}  // namespace gpupool::cli
