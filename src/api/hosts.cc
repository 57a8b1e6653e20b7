// Each rank offers a piece of its device's memory, tries to map the pieces of all others, and tells how that went:
// hosts.h says for what. Pieces live until all have answered.
//
// What breaks if this changes: every rank must judge by what all have told, and by nothing that it knows alone.
#include "api/hosts.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "core/make_backend.h"

namespace tw::api {

#if TOKENWAY_WITH_CUDA
namespace {

struct Card {
  char offer[160] = {};
  uint32_t bytes = 0;      // of the offer
  int32_t rank = -1;       // whose memory could not be mapped; -1: this rank's own is the trouble
  char trouble[300] = {};  // "" if there is none
};

void note(Card* card, int rank, const Status& status) {
  if (status.ok() || card->trouble[0] != 0) return;
  card->rank = rank;
  std::snprintf(card->trouble, sizeof card->trouble, "%s", status.text().c_str());
}

// Fails if a rank has told of a trouble: alike on all ranks.
Status judge(const std::vector<Card>& cards, const Sentence& apart) {
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    if (card.trouble[0] == 0) continue;
    if (card.rank < 0) {
      return fail(twUnsupported, "{}, and rank {} has no memory for other hosts: {}", apart, rank, card.trouble);
    }
    return fail(twUnsupported, "{}, and rank {} cannot have the memory of rank {}: {}", apart, rank, card.rank,
                card.trouble);
  }
  return {};
}

}  // namespace

Status connect_hosts(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather, int device,
                     const Sentence& apart, TimePoint deadline, std::unique_ptr<Bootstrap>* bootstrap) {
  Card mine;
  std::string own;
  std::shared_ptr<void> sample;
  Status offered = offer_sample(device, &own, &sample);
  if (offered.ok() && own.size() > sizeof mine.offer) offered = fail(twInternalError, "an offer is too long");
  note(&mine, -1, offered);
  if (offered.ok()) own.copy(mine.offer, own.size());
  mine.bytes = static_cast<uint32_t>(own.size());
  std::vector<Card> cards(static_cast<size_t>(size));
  TW_RETURN_IF_FAILED(gather_bytes(rank, allgather, &mine, cards.data(), sizeof mine));
  TW_RETURN_IF_FAILED(judge(cards, apart));
  Card tried;
  for (int other = 0; other < size; ++other) {
    if (other == rank || tried.trouble[0] != 0) continue;
    const Card& card = cards[static_cast<size_t>(other)];
    const std::string theirs(card.offer, std::min<size_t>(card.bytes, sizeof card.offer));
    note(&tried, other, check_sample(device, own, theirs));
  }
  TW_RETURN_IF_FAILED(gather_bytes(rank, allgather, &tried, cards.data(), sizeof tried));
  TW_RETURN_IF_FAILED(judge(cards, apart));
  return connect_tcp(rank, size, allgather, "NVLink", "the backends of ranks", deadline, bootstrap);
}
#else
Status connect_hosts(int, int, const std::function<int(const void*, void*, size_t)>&, int, const Sentence& apart,
                     TimePoint, std::unique_ptr<Bootstrap>*) {
  return fail(twUnsupported, "{}, and this library was built without CUDA", apart);
}
#endif

}  // namespace tw::api
