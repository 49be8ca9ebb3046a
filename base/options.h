#pragma once
// Configuration declared once. A struct holds the values, with the defaults as its member initialisers; its
// table names each member, its unit and its help:
//
//   struct ManagerOptions {
//     std::chrono::milliseconds leaseTtl{15000};
//     std::vector<options::Option> table() { return {{"lease-ttl", leaseTtl, "TIME", "a lease ends this long
//     ..."}}; }
//   };
//
// The table feeds a YAML file (key lease_ttl), the environment (<PREFIX>LEASE_TTL), the command line
// (--lease-ttl 15s), --help and the commented file in etc/. Later sources win, in that order. The struct
// outlives the Set and stays where it is. One thread. Errors are OptionError, whose text names the source,
// the option and what is wrong.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace gpupool::options {

class OptionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// "0", "512MiB", "20GiB", "1.5GB", "20G" (binary): a number of bytes.
struct Bytes {
  uint64_t value = 0;
  bool operator==(const Bytes&) const = default;
};

// A switch that may name a time with it: "--protect", "--protect=10s", "protect: 10s". The time is another
// option's member, so that of the two the later source wins.
struct SwitchWithTime {
  std::optional<bool>* on;  // none, and "": nobody has said
  std::chrono::milliseconds* time;
};

using Slot = std::variant<std::string*, bool*, uint32_t*, std::chrono::milliseconds*, Bytes*, SwitchWithTime>;

struct Option {
  template <class Value>
  Option(std::string name, Value& value, std::string unit, std::string help, bool commandOnly = false)
      : name(std::move(name)),
        slot(&value),
        unit(std::move(unit)),
        help(std::move(help)),
        commandOnly(commandOnly) {}
  Option(std::string name, SwitchWithTime slot, std::string unit, std::string help)
      : name(std::move(name)), slot(slot), unit(std::move(unit)), help(std::move(help)), commandOnly(false) {}
  std::string name;  // lower case, words joined by '-'
  Slot slot;
  std::string unit;  // for people: "TIME", "SIZE", "PATH" ...; empty for a switch
  std::string help;
  bool commandOnly;       // not in files or the environment: it makes sense for one invocation only
  std::string hint = {};  // said of a value that the option does not take, behind why
};

using Environment = std::function<const char*(const char*)>;  // getenv, or a test's

class Set {
 public:
  // prefix: of environment variables, e.g. "GPUPOOL_MANAGER_".
  Set(std::vector<Option> table, std::string prefix);

  // One map of scalars; unknown keys are errors. `origin` names the source in errors.
  void readYaml(const std::string& text, const std::string& origin);
  // False if there is no such file.
  bool readYamlFile(const std::string& path);
  void readEnvironment(const Environment& environment);
  // Reads "--name value", "--name=value", "--switch", "--switch=time" and "--no-switch" up to the first word
  // that is no option, or past
  // "--"; returns the rest. "--help" and "-h" set *help.
  std::vector<std::string> readArguments(const std::vector<std::string>& words, bool* help = nullptr);

  std::string help() const;                               // one paragraph an option, wrapped
  std::string environmentHelp() const;                    // the variables' names
  std::string yaml(std::string_view introduction) const;  // every option at its default, commented
  bool given(std::string_view name) const;                // set by any source

 private:
  struct Row {
    Option option;
    std::string fallback;  // the default, as text
    bool given = false;
  };
  Row* find(std::string_view name);
  void set(Row& row, const std::string& text, const std::string& origin);
  std::string suggestion(std::string_view name) const;
  std::vector<Row> rows_;
  std::string prefix_;
};

// Value from and to text; parse throws OptionError without an origin.
std::chrono::milliseconds parseTime(
    std::string_view text);  // "250ms", "15s", "2m", "1h"; a bare number is seconds
Bytes parseBytes(std::string_view text);
uint32_t parseCount(std::string_view text);
bool parseBool(std::string_view text);
std::string formatTime(std::chrono::milliseconds time);
std::string formatBytes(Bytes bytes);    // exact: the largest binary unit that divides it
std::string formatSize(uint64_t bytes);  // for people: "139.8 GiB"

// The parts of "a, b,c", without spaces around them and without empty ones.
std::vector<std::string> commaSeparated(const std::string& list);

// Indents by `indent` and wraps at 100 columns; keeps line breaks.
std::string wrap(std::string_view text, size_t indent);

}  // namespace gpupool::options
