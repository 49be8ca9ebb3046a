#include "base/options.h"

#include <map>

#include "catch.h"

using namespace gpupool;
using namespace gpupool::options;
using std::chrono::milliseconds;

namespace {

struct Sample {
  std::string path = "/somewhere";
  bool loud = false;
  bool fast = true;
  uint32_t count = 3;
  milliseconds time{1500};
  Bytes size{uint64_t{5} << 30};
  std::string once;
  std::optional<bool> guarded;
  milliseconds pause{4000};

  std::vector<Option> table() {
    return {{"path", path, "PATH", "Where."},
            {"loud", loud, "", "Say it."},
            {"fast", fast, "", "Do it."},
            {"a-count", count, "N", "How many."},
            {"time", time, "TIME", "How long."},
            {"size", size, "SIZE", "How much."},
            {"once", once, "TEXT", "This time.", true},
            {"guard", SwitchWithTime{&guarded, &pause}, "TIME", "Keep it."},
            {"pause", pause, "TIME", "Between."}};
  }
};

std::string message(const std::function<void()>& action) {
  try {
    action();
  } catch (const OptionError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("values and their texts") {
  CHECK(parseTime("250ms") == milliseconds(250));
  CHECK(parseTime("1.5s") == milliseconds(1500));
  CHECK(parseTime("15") == milliseconds(15000));
  CHECK(parseTime("2h") == milliseconds(7'200'000));
  CHECK(parseBytes("20GiB").value == uint64_t{20} << 30);
  CHECK(parseBytes("1.5GB").value == 1'500'000'000);
  CHECK(parseBytes("4096").value == 4096);
  for (const char* wrong : {"", "s", "1x", "-1s", "1e30s", "nan", "1 s", "inf"})
    CHECK_THROWS_AS(parseTime(wrong), OptionError);
  for (const char* wrong : {"", "GiB", "1XB", "-1", "1e300"}) CHECK_THROWS_AS(parseBytes(wrong), OptionError);
  for (const char* wrong : {"", "-1", "4294967296", "1.5", "0x10"})
    CHECK_THROWS_AS(parseCount(wrong), OptionError);
  for (milliseconds time : {milliseconds(0), milliseconds(1), milliseconds(61'000), milliseconds(3'600'000)})
    CHECK(parseTime(formatTime(time)) == time);
  for (uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 20, (uint64_t{3} << 30) + 4096})
    CHECK(parseBytes(formatBytes({size})).value == size);
}

TEST_CASE("the command line wins over the environment, and that over the file") {
  Sample sample;
  Set set(sample.table(), "SAMPLE_");
  set.readYaml("path: /file\na_count: 4\nsize: 1MiB\n", "sample.yaml");
  const std::map<std::string, std::string> variables = {
      {"SAMPLE_A_COUNT", "5"}, {"SAMPLE_SIZE", "2MiB"}, {"SAMPLE_TIME", ""}};
  set.readEnvironment([&](const char* name) {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
  const auto rest =
      set.readArguments({"--size=3MiB", "--loud", "--no-fast", "--once", "x", "program", "--time", "9s"});
  CHECK(sample.path == "/file");
  CHECK(sample.count == 5);
  CHECK(sample.size.value == 3 << 20);
  CHECK(sample.loud);
  CHECK_FALSE(sample.fast);
  CHECK(sample.once == "x");
  CHECK(sample.time == milliseconds(1500));
  CHECK(rest == std::vector<std::string>{"program", "--time", "9s"});
  CHECK(set.given("loud"));
  CHECK_FALSE(set.given("time"));
}

TEST_CASE("what follows -- is not ours") {
  Sample sample;
  Set set(sample.table(), "SAMPLE_");
  CHECK(set.readArguments({"--loud", "--", "--loud", "x"}) == std::vector<std::string>{"--loud", "x"});
}

TEST_CASE("a switch may name a time, and the next word is never its value") {
  const auto read = [](const std::vector<std::string>& words, const std::string& file = "") {
    Sample sample;
    Set set(sample.table(), "SAMPLE_");
    set.readYaml(file, "f.yaml");
    const auto rest = set.readArguments(words);
    const std::string said = !sample.guarded.has_value() ? "nothing" : *sample.guarded ? "on" : "off";
    return said + " " + std::to_string(sample.pause.count()) + " " + std::to_string(rest.size());
  };
  CHECK(read({}) == "nothing 4000 0");
  CHECK(read({"--guard", "10s"}) == "on 4000 1");
  CHECK(read({"--guard=10s", "x"}) == "on 10000 1");
  CHECK(read({"--guard=1"}) == "on 4000 0");
  CHECK(read({"--no-guard"}, "guard: 3s\n") == "off 3000 0");
  CHECK(read({"--guard=yes"}, "guard: 3s\n") == "on 3000 0");
  CHECK(read({"--pause", "5s"}, "guard: 3s\n") == "on 5000 0");
  CHECK(read({"--pause=5s", "--guard=6s"}) == "on 6000 0");
  CHECK(read({"--guard="}, "guard: yes\n") == "nothing 4000 0");
  CHECK(read({}, "guard: \"\"\n") == "nothing 4000 0");
  Sample sample;
  Set set(sample.table(), "SAMPLE_");
  CHECK(message([&] { set.readArguments({"--guard=soon"}); }) ==
        "--guard: 'soon' is neither true, nor false, nor a time (examples: 10s, 2m)");
}

TEST_CASE("errors name the source, the option and what is wrong") {
  Sample sample;
  Set set(sample.table(), "SAMPLE_");
  CHECK(message([&] { set.readYaml("path: a\nsizes: 3\n", "f.yaml"); }) ==
        "f.yaml:2: sizes: there is no such option");
  CHECK(message([&] { set.readYaml("once: a\n", "f.yaml"); }) == "f.yaml:1: once: there is no such option");
  CHECK(message([&] { set.readYaml("size: [1, 2]\n", "f.yaml"); }) ==
        "f.yaml:1: size: expected a single value");
  CHECK(message([&] {
          set.readYaml("time: soon\n", "f.yaml");
        }).find("f.yaml:1: time: 'soon' is not a time") == 0);
  CHECK(message([&] { set.readYaml("a: [", "f.yaml"); }).find("f.yaml: ") == 0);
  CHECK(message([&] { set.readArguments({"--a-count"}); }) == "--a-count: a value is missing (N)");
  CHECK(message([&] { set.readArguments({"--a-count", "many"}); }) ==
        "--a-count: 'many' is not a whole number");
  CHECK(message([&] { set.readArguments({"--a-count", "99999999999"}); }) ==
        "--a-count: '99999999999' is too large");
  CHECK(message([] { parseTime("99999d"); }) == "'99999d' is too long");
  CHECK(message([] { parseBytes("99999999999GiB"); }) == "'99999999999GiB' is too large");
  CHECK(message([&] { set.readArguments({"--nothing"}); }).find("--nothing: there is no such option") == 0);
  const auto suggests = [&](const std::string& word, const std::string& known) {
    return message([&] { set.readArguments({word}); }).find("did you mean " + known) != std::string::npos;
  };
  CHECK(suggests("--a-cuont", "--a-count? --help"));
  CHECK(suggests("--no-fats", "--no-fast?"));
  CHECK(!suggests("--nothing", ""));
  CHECK(message([&] { set.readArguments({"-x"}); }).find("-x: there is no such option") == 0);
  CHECK(message([&] { set.readArguments({"--no-a-count"}); }).find("there is no such option") !=
        std::string::npos);
  CHECK(message([&] {
          set.readEnvironment(
              [](const char* name) { return std::string(name) == "SAMPLE_LOUD" ? "perhaps" : nullptr; });
        }) == "SAMPLE_LOUD: 'perhaps' is neither true nor false");
}

TEST_CASE("the generated file gives every default back") {
  Sample sample;
  const std::string file = Set(sample.table(), "SAMPLE_").yaml("A sample.");
  Sample changed;
  changed.path = "x", changed.loud = true, changed.fast = false, changed.count = 9,
  changed.time = milliseconds(1), changed.size = {1};
  Set(changed.table(), "SAMPLE_").readYaml(file, "generated");
  CHECK(changed.path == sample.path);
  CHECK(changed.loud == sample.loud);
  CHECK(changed.fast == sample.fast);
  CHECK(changed.count == sample.count);
  CHECK(changed.time == sample.time);
  CHECK(changed.size == sample.size);
  CHECK(file.find("once") == std::string::npos);
  CHECK(file.find("# How much. [SIZE]\nsize: 5GiB\n") != std::string::npos);
  CHECK(file.find("# Keep it. [true|false|TIME]\nguard: \"\"\n") != std::string::npos);
}

TEST_CASE("the help names every option with its default") {
  Sample sample;
  const std::string help = Set(sample.table(), "SAMPLE_").help();
  CHECK(help.find("--size SIZE\n      How much. Default: 5GiB.\n") != std::string::npos);
  CHECK(help.find("--no-fast turns it off") != std::string::npos);
  CHECK(help.find("--once TEXT") != std::string::npos);
  CHECK(help.find("--guard[=TIME]\n      Keep it.\n") != std::string::npos);
}
