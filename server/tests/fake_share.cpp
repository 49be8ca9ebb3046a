#include "server/tests/fake_share.h"

#include <fcntl.h>
#include <unistd.h>

namespace gpupool::server::test {
namespace {

constexpr uint64_t kPiece = 1;

std::string refused(const ShareAnswer& answer) {
  return "refused " + std::to_string(static_cast<int>(answer.error));
}

}  // namespace

std::string FakeShare::offer() {
  const int piece = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const ShareAnswer answer =
      process_.share({ShareReport::What::offer, {kPiece, 0, kPieceBytes, 0, kPieceBytes}, {}, 0}, piece);
  ::close(piece);
  return answer.error == ShareAnswer::Error::none ? answer.key.server.text() + answer.key.key.text()
                                                  : refused(answer);
}

std::string FakeShare::open(const std::string& token) {
  const auto server = Id::parse(token.substr(0, kTokenDigits / 2)),
             key = Id::parse(token.substr(kTokenDigits / 2));
  if (!server || !key) return "no token";
  const ShareAnswer answer = process_.share({ShareReport::What::open, {}, {*server, *key}, 0});
  if (answer.descriptor >= 0) ::close(answer.descriptor);
  if (answer.error != ShareAnswer::Error::none) return refused(answer);
  opening_ = answer.opening;
  return "opened at " + std::to_string(answer.offer.place);
}

std::string FakeShare::order(char letter, int socket) {
  if (letter == 'O') return offer();
  if (letter == 'I') {
    std::string token(kTokenDigits, ' ');
    for (size_t got = 0; got < token.size();) {
      const ssize_t more = read(socket, token.data() + got, token.size() - got);
      if (more <= 0) return "";
      got += static_cast<size_t>(more);
    }
    return open(token);
  }
  if (letter == 'X') process_.tellShare({ShareReport::What::close, {}, {}, opening_});
  if (letter == 'F') process_.tellShare({ShareReport::What::endPiece, {}, {}, kPiece});
  return letter == 'X' || letter == 'F' ? "told" : "";
}

}  // namespace gpupool::server::test
