#include "base/options.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace gpupool::options {
namespace {

std::string replaced(std::string text, char from, char to) {
  std::replace(text.begin(), text.end(), from, to);
  return text;
}

std::string variableName(const std::string& prefix, const std::string& name) {
  std::string upper = prefix + replaced(name, '-', '_');
  for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return upper;
}

std::optional<bool> knownBool(std::string_view text) {
  if (text == "true" || text == "yes" || text == "on" || text == "1") return true;
  if (text == "false" || text == "no" || text == "off" || text == "0") return false;
  return std::nullopt;
}

std::string format(const Slot& slot) {
  struct Visitor {
    std::string operator()(std::string* v) const { return *v; }
    std::string operator()(bool* v) const { return *v ? "true" : "false"; }
    std::string operator()(uint32_t* v) const { return std::to_string(*v); }
    std::string operator()(std::chrono::milliseconds* v) const { return formatTime(*v); }
    std::string operator()(Bytes* v) const { return formatBytes(*v); }
    std::string operator()(const SwitchWithTime& v) const {
      return !v.on->has_value() ? "" : **v.on ? "true" : "false";
    }
  };
  return std::visit(Visitor{}, slot);
}

// Words first: "1" and "0" are on and off, as of any switch.
void assignTimed(const SwitchWithTime& slot, const std::string& text) {
  if (const auto known = knownBool(text); known || text.empty()) {
    *slot.on = known;
    return;
  }
  try {
    *slot.time = parseTime(text);
  } catch (const OptionError&) {
    throw OptionError("'" + text + "' is neither true, nor false, nor a time (examples: 10s, 2m)");
  }
  *slot.on = true;
}

void assign(const Slot& slot, const std::string& text) {
  struct Visitor {
    const std::string& text;
    void operator()(std::string* v) const { *v = text; }
    void operator()(bool* v) const { *v = parseBool(text); }
    void operator()(uint32_t* v) const { *v = parseCount(text); }
    void operator()(std::chrono::milliseconds* v) const { *v = parseTime(text); }
    void operator()(Bytes* v) const { *v = parseBytes(text); }
    void operator()(const SwitchWithTime& v) const { assignTimed(v, text); }
  };
  std::visit(Visitor{text}, slot);
}

bool takesTime(const Option& option) { return std::holds_alternative<SwitchWithTime>(option.slot); }
// No value has to follow it.
bool isSwitch(const Option& option) {
  return std::holds_alternative<bool*>(option.slot) || takesTime(option);
}

std::string unitOf(const Option& option) {
  return takesTime(option) ? "true|false|" + option.unit : option.unit;
}

// A decimal number and the letters behind it.
std::pair<double, std::string_view> numberAndUnit(std::string_view text, const char* what) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || !(number >= 0) || !std::isfinite(number))
    throw OptionError("'" + std::string(text) + "' is not " + what);
  return {number, text.substr(static_cast<size_t>(end - text.data()))};
}

// How many letters have to be put in, taken out or exchanged.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::chrono::milliseconds parseTime(std::string_view text) {
  constexpr const char* kWhat = "a time (examples: 250ms, 15s, 2m, 1h)";
  const auto [number, unit] = numberAndUnit(text, kWhat);
  double factor = 0;
  if (unit == "ms") factor = 1;
  if (unit == "s" || unit.empty()) factor = 1000;
  if (unit == "m" || unit == "min") factor = 60'000;
  if (unit == "h") factor = 3'600'000;
  if (unit == "d") factor = 86'400'000;
  if (factor == 0) throw OptionError("'" + std::string(text) + "' is not " + kWhat);
  if (number * factor > 4e12) throw OptionError("'" + std::string(text) + "' is too long");
  return std::chrono::milliseconds(std::llround(number * factor));
}

Bytes parseBytes(std::string_view text) {
  constexpr const char* kWhat = "a size (examples: 512MiB, 20GiB, 1.5GB)";
  const auto [number, unit] = numberAndUnit(text, kWhat);
  static constexpr struct {
    const char* name;
    double factor;
  } kUnits[] = {{"", 1},         {"B", 1},      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30},
                {"TiB", 0x1p40}, {"K", 0x1p10}, {"M", 0x1p20},   {"G", 0x1p30},   {"T", 0x1p40},
                {"KB", 1e3},     {"kB", 1e3},   {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  for (const auto& known : kUnits) {
    if (unit != known.name) continue;
    if (number * known.factor >= 0x1p63) throw OptionError("'" + std::string(text) + "' is too large");
    return {static_cast<uint64_t>(number * known.factor)};
  }
  throw OptionError("'" + std::string(text) + "' is not " + kWhat);
}

uint32_t parseCount(std::string_view text) {
  uint32_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if ((error != std::errc{} && error != std::errc::result_out_of_range) || end != text.data() + text.size())
    throw OptionError("'" + std::string(text) + "' is not a whole number");
  if (error != std::errc{}) throw OptionError("'" + std::string(text) + "' is too large");
  return count;
}

bool parseBool(std::string_view text) {
  if (const auto known = knownBool(text)) return *known;
  throw OptionError("'" + std::string(text) + "' is neither true nor false");
}

std::string formatTime(std::chrono::milliseconds time) {
  const auto ms = time.count();
  if (ms == 0) return "0s";
  if (ms % 3'600'000 == 0) return std::to_string(ms / 3'600'000) + "h";
  if (ms % 60'000 == 0) return std::to_string(ms / 60'000) + "m";
  if (ms % 1000 == 0) return std::to_string(ms / 1000) + "s";
  return std::to_string(ms) + "ms";
}

std::string formatBytes(Bytes bytes) {
  static constexpr const char* kNames[] = {"", "KiB", "MiB", "GiB", "TiB"};
  uint64_t value = bytes.value;
  int unit = 0;
  while (unit < 4 && value != 0 && value % 1024 == 0) value /= 1024, ++unit;
  return std::to_string(value) + kNames[unit];
}

std::string formatSize(uint64_t bytes) {
  static constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (unit < 4 && value >= 1024) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 || value >= 100 ? "%.0f %s" : "%.1f %s", value, kNames[unit]);
  return text;
}

std::string wrap(std::string_view text, size_t indent) {
  constexpr size_t kColumns = 100;
  const std::string margin(indent, ' ');
  std::string out, line;
  std::istringstream lines{std::string(text)};
  for (std::string paragraph; std::getline(lines, paragraph);) {
    std::istringstream words(paragraph);
    line = margin;
    bool empty = true;
    for (std::string word; words >> word; empty = false) {
      if (!empty && line.size() + 1 + word.size() > kColumns) {
        out += line + "\n";
        line = margin + word;
      } else {
        line += (empty ? "" : " ") + word;
      }
    }
    out += (empty ? "" : line) + "\n";
  }
  return out;
}

Set::Set(std::vector<Option> table, std::string prefix) : prefix_(std::move(prefix)) {
  for (Option& option : table) {
    std::string fallback = format(option.slot);
    rows_.push_back({std::move(option), std::move(fallback)});
  }
}

Set::Row* Set::find(std::string_view name) {
  for (Row& row : rows_)
    if (row.option.name == name) return &row;
  return nullptr;
}

bool Set::given(std::string_view name) const {
  for (const Row& row : rows_)
    if (row.option.name == name) return row.given;
  return false;
}

void Set::set(Row& row, const std::string& text, const std::string& origin) {
  try {
    assign(row.option.slot, text);
    row.given = true;
  } catch (const OptionError& error) {
    const std::string& hint = row.option.hint;
    throw OptionError(origin + ": " + error.what() + (hint.empty() ? "" : ": " + hint));
  }
}

void Set::readYaml(const std::string& text, const std::string& origin) try {
  const YAML::Node root = YAML::Load(text);
  if (root.IsNull()) return;  // nothing but comments
  if (!root.IsMap()) throw OptionError(origin + ": expected one 'option: value' a line");
  for (const auto& entry : root) {
    const std::string key = entry.first.as<std::string>();
    const std::string where = origin + ":" + std::to_string(entry.first.Mark().line + 1) + ": " + key;
    Row* row = find(replaced(key, '_', '-'));
    if (row == nullptr || row->option.commandOnly) throw OptionError(where + ": there is no such option");
    if (entry.second.IsNull()) {
      set(*row, std::holds_alternative<std::string*>(row->option.slot) ? "" : row->fallback, where);
    } else if (entry.second.IsScalar()) {
      set(*row, entry.second.Scalar(), where);
    } else {
      throw OptionError(where + ": expected a single value");
    }
  }
} catch (const YAML::Exception& error) {
  throw OptionError(origin + ": " + error.what());
}

bool Set::readYamlFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return false;
  std::ostringstream text;
  text << file.rdbuf();
  readYaml(text.str(), path);
  return true;
}

void Set::readEnvironment(const Environment& environment) {
  for (Row& row : rows_) {
    if (row.option.commandOnly) continue;
    const std::string name = variableName(prefix_, row.option.name);
    const char* value = environment(name.c_str());
    if (value != nullptr && *value != '\0') set(row, value, name);
  }
}

std::vector<std::string> Set::readArguments(const std::vector<std::string>& words, bool* help) {
  size_t at = 0;
  for (; at < words.size(); ++at) {
    const std::string& word = words[at];
    if (word == "--") return {words.begin() + static_cast<ptrdiff_t>(at) + 1, words.end()};
    if (help != nullptr && (word == "--help" || word == "-h")) {
      *help = true;
      continue;
    }
    if (word.size() < 2 || word[0] != '-') break;
    const size_t equals = word.find('=');
    const std::string name = word.rfind("--", 0) == 0 ? word.substr(2, equals - 2) : "";
    Row* row = find(name);
    if (row != nullptr && isSwitch(row->option)) {
      set(*row, equals == word.npos ? "true" : word.substr(equals + 1), "--" + name);
    } else if (row != nullptr) {
      if (equals == word.npos && at + 1 == words.size())
        throw OptionError("--" + name + ": a value is missing (" + row->option.unit + ")");
      set(*row, equals == word.npos ? words[++at] : word.substr(equals + 1), "--" + name);
    } else if (Row* negated = name.rfind("no-", 0) == 0 ? find(name.substr(3)) : nullptr;
               negated != nullptr && isSwitch(negated->option) && equals == word.npos) {
      set(*negated, "false", word);
    } else {
      throw OptionError(word + ": there is no such option; " + suggestion(name) + "--help lists them");
    }
  }
  return {words.begin() + static_cast<ptrdiff_t>(at), words.end()};
}

// "did you mean --gpus? "; "": none of the table is close to that.
std::string Set::suggestion(std::string_view name) const {
  std::string best;
  if (name.empty()) return best;
  size_t least = name.size() < 4 ? 2 : 3;  // fewer than so many slips
  for (const Row& row : rows_)
    for (const std::string& known : {row.option.name, "no-" + row.option.name}) {
      if (known != row.option.name && !isSwitch(row.option)) continue;
      const size_t far = distance(name, known);
      if (far < least) least = far, best = known;
    }
  return best.empty() ? "" : "did you mean --" + best + "? ";
}

std::string Set::help() const {
  std::string out;
  for (const Row& row : rows_) {
    const std::string& unit = row.option.unit;
    out += "  --" + row.option.name;
    out += (takesTime(row.option) ? "[=" + unit + "]" : isSwitch(row.option) ? "" : " " + unit) + "\n";
    std::string text = row.option.help;
    if (!isSwitch(row.option)) text += row.fallback.empty() ? "" : " Default: " + row.fallback + ".";
    if (isSwitch(row.option) && row.fallback == "true")
      text += " Default: on; --no-" + row.option.name + " turns it off.";
    out += wrap(text, 6);
  }
  return out;
}

std::string Set::environmentHelp() const {
  std::string out;
  for (const Row& row : rows_)
    if (!row.option.commandOnly) out += (out.empty() ? "" : ", ") + variableName(prefix_, row.option.name);
  return out;
}

std::string Set::yaml(std::string_view introduction) const {
  const auto comment = [](std::string_view text) {
    std::istringstream lines(wrap(text, 2));
    std::string out;
    for (std::string line; std::getline(lines, line);)
      out += line.empty() ? "#\n" : "#" + line.substr(1) + "\n";
    return out;
  };
  std::string out = comment(introduction);
  for (const Row& row : rows_) {
    if (row.option.commandOnly) continue;
    out += "\n" + comment(row.option.help + (row.option.unit.empty() ? "" : " [" + unitOf(row.option) + "]"));
    const bool text = std::holds_alternative<std::string*>(row.option.slot) || row.fallback.empty();
    out += replaced(row.option.name, '-', '_') + ": " + (text ? "\"" + row.fallback + "\"" : row.fallback) +
           "\n";
  }
  return out;
}

std::vector<std::string> commaSeparated(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    word.erase(0, word.find_first_not_of(' '));
    word.erase(word.find_last_not_of(' ') + 1);
    if (!word.empty()) parts.push_back(std::move(word));
  }
  return parts;
}

}  // namespace gpupool::options
