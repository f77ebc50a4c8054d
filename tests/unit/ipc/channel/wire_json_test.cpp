// The rings' memory is of atomics, so ipc/ring/ring.h is not made from wire.json: it must be the
// same, member by member.

#include "ipc/channel/wire.h"

#include <cstddef>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include <boost/json.hpp>
#include <gtest/gtest.h>

#include "ipc/base/packet.h"
#include "ipc/ring/ring.h"

namespace bulkhead::wire {
namespace {

namespace json = boost::json;

static_assert(packet_bytes_max == bulkhead::packet_bytes_max);

struct Member {
    std::size_t offset;
    std::size_t size;
};

json::object read() {
    std::ifstream file{BULKHEAD_SOURCE_DIR "/ipc/channel/wire.json"};
    return json::parse(std::string{std::istreambuf_iterator<char>{file}, {}}).as_object();
}

TEST(WireJson, HasTheRingsMemory) {
    const json::object spec = read();
    const json::object& rings = spec.at("rings").as_object();
    EXPECT_EQ(rings.at("header_bytes").as_int64(), ring::header_bytes);
    EXPECT_EQ(rings.at("cell_bytes").as_int64(), sizeof(ring::Cell));
    EXPECT_EQ(rings.at("payload_bytes").as_int64(), ring::payload_bytes);
    EXPECT_EQ(rings.at("asleep").at("packets").as_int64(), ring::wants_packets);
    EXPECT_EQ(rings.at("asleep").at("room").as_int64(), ring::wants_room);
    EXPECT_EQ(rings.at("asleep").at("left").as_int64(), ring::has_left);
    using ring::Header;
    using ring::Side;
    const std::map<std::string, Member> real{
        {"worker asleep", {offsetof(Header, worker) + offsetof(Side, asleep), sizeof(Side::asleep)}},
        {"worker reserved", {offsetof(Header, worker) + offsetof(Side, reserved), sizeof(Side::reserved)}},
        {"client asleep", {offsetof(Header, client) + offsetof(Side, asleep), sizeof(Side::asleep)}},
        {"client reserved", {offsetof(Header, client) + offsetof(Side, reserved), sizeof(Side::reserved)}},
        {"cells read by the worker", {offsetof(Header, of_worker), sizeof(ring::Progress::cells)}},
        {"cells read by the client", {offsetof(Header, of_client), sizeof(ring::Progress::cells)}}};
    const json::array& fields = rings.at("fields").as_array();
    EXPECT_EQ(fields.size(), real.size());
    for (const json::value& field : fields) {
        const std::string name{field.at(0).as_string()};
        SCOPED_TRACE(name);
        ASSERT_TRUE(real.contains(name));
        EXPECT_EQ(real.at(name).size, field.at(1) == "u32" ? 4U : 8U);
        EXPECT_EQ(static_cast<std::int64_t>(real.at(name).offset), field.at(2).as_int64());
    }
}

}  // namespace
}  // namespace bulkhead::wire
