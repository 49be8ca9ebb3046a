// Pins what manager, servers, holders and tools of different builds say to each other, and what manager and
// servers find of earlier ones in their stores: schema/pool.capnp says when its version is raised.
//
// pool_interface.txt holds a line for each (pinned_lines.h). A line that is gone or other than it was wants
// another protocolVersion, and is known still to whoever speaks oldestProtocol; so does an added one that an
// older build must not pass over.
#include "pinned_lines.h"
#include "schema/administration.capnp.h"
#include "schema/pool.capnp.h"
#include "schema/session.capnp.h"
#include "schema/store.capnp.h"

using namespace gpupool;

TEST_CASE("a manager, server or holder of another build of this version finds what it relies on") {
  test::PinnedLines lines;
  lines.add(capnp::Schema::from<schema::Manager>());  // and of it ServerControl, Administration
  lines.add(capnp::Schema::from<schema::SessionHello>());
  lines.add(capnp::Schema::from<schema::SessionChallenge>());
  lines.add(capnp::Schema::from<schema::SessionProof>());
  lines.add(capnp::Schema::from<schema::SessionAnswer>());
  lines.add(capnp::Schema::from<schema::CheckpointAnswer>());
  lines.add(capnp::Schema::from<schema::HandAnswer>());
  lines.add(capnp::Schema::from<schema::FiguresQuery>());
  lines.add(capnp::Schema::from<schema::FiguresReport>());
  lines.add(capnp::Schema::from<schema::StoredServer>());
  lines.add(capnp::Schema::from<schema::StoredLease>());
  lines.add(capnp::Schema::from<schema::StoredToken>());
  lines.check(POOL_INTERFACE, "protocol " + std::to_string(schema::PROTOCOL_VERSION));
}
