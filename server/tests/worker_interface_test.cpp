// Pins what servers and workers of different builds rely on: server/worker_interface.h says what that is, and
// when its number is raised.
//
// worker_interface.txt holds a line for each. Lines may be added, with GPUPOOL_UPDATE_GOLDEN=1: a reader of
// an older build passes over fields, options and verbs that it does not know. A line that is gone or other
// than it was wants another kWorkerInterface; so does an added one that an older build must not pass over.
#include <iterator>
#include <sstream>
#include <string>

#include "pinned_lines.h"
#include "schema/record.capnp.h"
#include "schema/worker.capnp.h"
#include "server/copier/protocol.h"
#include "server/worker_interface.h"
#include "server/worker_process.h"

using namespace gpupool;
using namespace gpupool::server;

namespace {

class Interface : public test::PinnedLines {
 public:
  Interface() {
    add(capnp::Schema::from<schema::WorkerOrder>());
    add(capnp::Schema::from<schema::WorkerStart>());
    add(capnp::Schema::from<schema::WorkerReport>());
    add(capnp::Schema::from<schema::SessionRecord>());
    add("state format " + std::to_string(schema::STATE_FORMAT));
    add("control descriptor " + std::to_string(kControlDescriptor));
    add("signal of a server's death " + std::to_string(kServerDiedSignal));
    add("exit status when stopped " + std::to_string(WorkerProcess::kExitStopped));
    addOptions();
    addCopier();
  }

 private:
  void addOptions() {
    std::istringstream words(kWorkerUsage);
    for (std::string word; words >> word;)
      if (const size_t at = word.find("--"); at != std::string::npos)
        add("option " + word.substr(at, word.find_first_not_of("-abcdefghijklmnopqrstuvwxyz", at) - at));
  }
  void addCopier() {
    const std::pair<const char*, CopierVerb> verbs[] = {
        {"plan", CopierVerb::plan},       {"reserve", CopierVerb::reserve},
        {"takeOut", CopierVerb::takeOut}, {"beginBringIn", CopierVerb::beginBringIn},
        {"bringIn", CopierVerb::bringIn}, {"done", CopierVerb::done},
        {"refused", CopierVerb::refused}, {"across", CopierVerb::across}};
    for (const auto& [name, verb] : verbs)
      add(std::string("copier ") + name + " " + std::to_string(static_cast<uint32_t>(verb)));
    add("copier magic " + std::to_string(kCopierMagic));
    add("copier datagram " + std::to_string(kCopierDatagram) + ", batch " + std::to_string(kMostInBatch));
    add("copier bytes: message " + std::to_string(sizeof(CopierMessage)) + ", planned " +
        std::to_string(sizeof(CopierPlanned)) + ", placed " + std::to_string(sizeof(CopierPlaced)) +
        ", crossing " + std::to_string(sizeof(CopierCrossing)));
  }
};

}  // namespace

TEST_CASE("a worker of another build of this interface finds what it relies on") {
  Interface().check(WORKER_INTERFACE, "interface " + std::to_string(kWorkerInterface));
}
