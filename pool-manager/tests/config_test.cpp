// etc/client.yaml and etc/manager.yaml are what the option tables say: every option, at its default, with its
// help. After an option has changed, run this test once with GPUPOOL_WRITE_CONFIG=1 to write the files again.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "catch.h"
#include "pool-manager/cli/client_options.h"
#include "pool-manager/manager_options.h"

using namespace gpupool;

namespace {

template <class Options>
void check(const std::string& name, const std::string& prefix, const char* introduction) {
  Options defaults;
  const std::string expected = options::Set(defaults.table(), prefix).yaml(introduction);
  const std::string path = std::string(ETC_FOLDER "/") + name;
  if (std::getenv("GPUPOOL_WRITE_CONFIG") != nullptr) std::ofstream(path) << expected;
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  CHECK(text.str() == expected);
  // And it is a file that the program reads, changing nothing.
  Options read;
  options::Set set(read.table(), prefix);
  set.readYaml(text.str(), name);
  CHECK(options::Set(read.table(), prefix).yaml(introduction) == expected);
}

}  // namespace

TEST_CASE("etc/client.yaml") {
  check<cli::ClientOptions>("client.yaml", cli::kClientPrefix, cli::kClientIntroduction);
}
TEST_CASE("etc/manager.yaml") {
  check<pool::ManagerOptions>("manager.yaml", pool::kManagerPrefix, pool::kManagerIntroduction);
}
