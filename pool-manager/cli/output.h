#pragma once
// How a command prints a list: --output (-o) table, wide or json, or --json.

#include "pool-manager/cli/command.h"

namespace gpupool::cli {

struct Output {
  std::string form = "table";
  bool json = false;

  void addTo(std::vector<options::Option>& own) {
    own.push_back({"output", form, "table|wide|json", "Also -o. wide: with more columns.", true});
    own.push_back({"json", json, "", "--output json.", true});
  }
  bool wide() const { return form == "wide"; }
};

// "-o" as options::Set knows it.
Words withOutput(Words words);
// Throws an OptionError if there is no such form.
void check(Output& output);

}  // namespace gpupool::cli
