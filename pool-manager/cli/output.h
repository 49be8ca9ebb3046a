#pragma once
// How a command prints a list: --output (-o) table, wide or json, or --json.

#include <nlohmann/json.hpp>

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

std::string timeText(uint64_t ms);  // since 1970: "2026-12-01 07:30:00", of this machine's zone
// On stdout, for people and programs; what is no UTF-8 is replaced.
void printJson(const nlohmann::json& value);

// A command without arguments that lists what the manager has: `fetch` it as these options say, then `print`
// it as a table, or, each by `toJson`, as an array. Returns the exit status.
template <class Fetch, class Print, class ToJson>
int listAs(const Words& words, const Help& help, const std::vector<std::string>& options, Fetch&& fetch,
           Print&& print, ToJson&& toJson) {
  ClientOptions client;
  Output output;
  std::vector<options::Option> own;
  output.addTo(own);
  const Parsed parsed = parseCommand(withOutput(words), help, &client, options, own);
  if (parsed.helped) return 0;
  check(output);
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
  const auto found = fetch(client);
  if (output.json) {
    auto all = nlohmann::json::array();
    for (const auto& one : found) all.push_back(toJson(one));
    printJson(all);
  } else {
    print(found, output.wide());
  }
  return 0;
}

}  // namespace gpupool::cli
