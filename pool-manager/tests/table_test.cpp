// Tables for people.
#include "pool-manager/cli/table.h"

#include <sstream>

#include "catch.h"

using namespace gpupool;

TEST_CASE("columns stand below each other, whatever letters names have") {
  std::ostringstream out;
  cli::printTable({{"SERVER", "STATE"}, {"node7", "alive"}, {"Z\u00fcrich", "alive"}, {"", "lost"}}, 1, out);
  CHECK(out.str() ==
        " SERVER  STATE\n"
        " node7   alive\n"
        " Z\u00fcrich  alive\n"
        "         lost\n");
}
