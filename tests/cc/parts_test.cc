// Sentences in parts: how they are written (core/sentence.h), shown to callers (tokenway/errors.h) and carried to
// peers.
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "core/record.h"
#include "core/status.h"
#include "harness.h"

namespace tw::test {
namespace {

// A part, copied.
struct Shown {
  twPartKind_t kind;
  std::string text;
  std::string name;
  std::vector<int64_t> indices;
  int64_t value;

  bool operator==(const Shown&) const = default;
};

Shown plain(const std::string& said) { return {twPartText, said, "", {-1, -1}, 0}; }

template <class Read>
std::vector<Shown> shown(Read&& read) {
  std::vector<Shown> parts;
  twErrorPart_t part = TW_ERROR_PART_INIT;
  while (read(static_cast<int32_t>(parts.size()), &part) == twSuccess) {
    parts.push_back({part.kind, part.text, part.name, {part.indices[0], part.indices[1]}, part.value});
  }
  return parts;
}

std::string joined(const std::vector<Shown>& parts) {
  std::string all;
  for (const Shown& part : parts) all += part.text;
  return all;
}

TEST(Parts, AreMarkedWhereTheyAreWritten) {
  const Sentence sentence =
      compose("{} is {}; it must be from {} to {}, as {} and {} say, {}", Argument("config.payloads[].elements", 2),
              Value(-7), Least(1), Most(9), Function{"twDispatch"}, TW_CONSTANT(twFlat), compose("{}!", 2.5));
  EXPECT_EQ(sentence.text(),
            "config.payloads[2].elements is -7; it must be from 1 to 9, as twDispatch and twFlat (2) say, 2.5!");
  const std::vector<Sentence::Part>& parts = sentence.parts();
  ASSERT_EQ(parts.size(), 12u);
  EXPECT_EQ(parts[0].kind, twPartArgument);
  EXPECT_EQ(parts[0].name, "config.payloads[].elements");
  for (const size_t i : {2u, 4u, 6u}) {  // numbers know their argument
    EXPECT_EQ(parts[i].name, parts[0].name);
    EXPECT_EQ(parts[i].indices[0], 2);
  }
  EXPECT_EQ(parts[2].value, -7);
  EXPECT_EQ(parts[8].kind, twPartFunction);
  EXPECT_EQ(parts[10].name, "twFlat");
  EXPECT_EQ(parts[10].value, 2);
  EXPECT_EQ(parts[11].text, " say, 2.5!") << "text is one part";
}

TEST(Parts, IndicesOfArguments) {
  EXPECT_EQ(Sentence(Argument("ids[]", 3, 0)).text(), "ids[3, 0]");
  EXPECT_EQ(Sentence(Argument("ids[]", 3)).text(), "ids[3]");
  EXPECT_EQ(Sentence(Argument("ids[]")).text(), "ids");
  EXPECT_EQ(Sentence(Argument("config.lanes", 3)).text(), "config.lanes");
}

TEST(Parts, OfTheLastError) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.top_k = 77;
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
  const std::string sentence = twLastError();
  const std::string most = std::to_string(config.num_experts);
  const std::vector<Shown> wanted{
      {twPartArgument, "config.top_k", "config.top_k", {-1, -1}, 0},
      plain(" is "),
      {twPartValue, "77", "config.top_k", {-1, -1}, 77},
      plain("; it must be from "),
      {twPartLeast, "1", "config.top_k", {-1, -1}, 1},
      plain(" to "),
      {twPartMost, most, "config.top_k", {-1, -1}, config.num_experts},
  };
  EXPECT_EQ(shown(twLastErrorPart), wanted);
  EXPECT_EQ(sentence, joined(wanted));
  // Past the last part, and into no struct: the sentence stays.
  twErrorPart_t part = TW_ERROR_PART_INIT;
  EXPECT_EQ(twLastErrorPart(7, &part), twInvalidArgument);
  EXPECT_EQ(twLastErrorPart(-1, &part), twInvalidArgument);
  EXPECT_EQ(twLastErrorPart(0, nullptr), twInvalidArgument);
  EXPECT_EQ(twLastError(), sentence);
  // A caller of an older version has a smaller struct.
  part.size = offsetof(twErrorPart_t, indices);
  part.value = 4711;
  EXPECT_EQ(twLastErrorPart(2, &part), twSuccess);
  EXPECT_STREQ(part.name, "config.top_k");
  EXPECT_EQ(part.value, 4711);
  std::thread([] { EXPECT_TRUE(shown(twLastErrorPart).empty()) << "a thread has its own"; }).join();
}

// The parts are those of the record that this thread has read last.
TEST(Parts, OfARecord) {
  World world(2, impatient());
  Exchange exchange(world, make_traffic(world.config, {4, 4}, 1), {}, 1);
  EXPECT_TW(twTimeout, exchange[0].dispatch());
  const twErrorRecord_t record = error_of(world[0]);
  const std::vector<Shown> parts = shown(twRecordPart);
  EXPECT_EQ(joined(parts), record.message);
  EXPECT_NE(std::strstr(record.message, "rank 1 did not arrive in time"), nullptr);
  std::thread([&] { EXPECT_EQ(error_of(world[1]).result, twSuccess); }).join();
  EXPECT_EQ(shown(twRecordPart), parts);
  World other(1, impatient());
  EXPECT_EQ(error_of(other[0]).result, twSuccess);
  EXPECT_TRUE(shown(twRecordPart).empty());
}

// A record's message is cut to its field; its parts are not.
TEST(Parts, LongRecords) {
  ErrorRecord record = empty_record();
  record.set_sentence(compose("{} {}", std::string(600, 'x'), Argument("config.lanes")));
  EXPECT_EQ(std::strlen(record.message), sizeof record.message - 1);
  EXPECT_EQ(record.sentence.parts().size(), 2u);
  record.set_sentence("short");
  EXPECT_STREQ(record.message, "short");
}

TEST(Parts, TravelToPeers) {
  const Status mine = fail(twInvalidArgument, "{} is {}; not {}", Argument("ids[]", 3, 1), Value(int64_t{1} << 40),
                           TW_CONSTANT(twGathered));
  const std::string bytes = pack_result(mine).take();
  Unpacker reader(bytes);
  const Status heard = read_result(5, reader);
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(heard.code, twInvalidArgument);
  EXPECT_EQ(heard.text(), "rank 5: ids[3, 1] is 1099511627776; not twGathered (1)");
  ASSERT_EQ(heard.sentence.parts().size(), 6u);
  EXPECT_EQ(heard.sentence.parts()[1].name, "ids[]");
  EXPECT_EQ(heard.sentence.parts()[1].indices[1], 1);
  EXPECT_EQ(heard.sentence.parts()[3].value, int64_t{1} << 40);
  for (size_t cut = 0; cut < bytes.size(); ++cut) {  // whatever ends too early is read to its end, and no further
    const std::string less = bytes.substr(0, cut);
    Unpacker short_reader(less);
    (void)read_result(5, short_reader);
    EXPECT_FALSE(short_reader.ok()) << cut;
  }
}

}  // namespace
}  // namespace tw::test
