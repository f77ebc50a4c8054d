/// `bulkhead top --once` with a daemon that refuses one of its questions.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/clients/fake_daemon.h"
#include "tests/unit/cli/ran.h"

namespace bulkhead::cli {
namespace {

namespace json = boost::json;
using test::FakeDaemon;
using testing::HasSubstr;

TEST(TopOnce, ShowsTheModelsThoughTheGpusCannotBeReadAndFailsIfTheModelsCannot) {
    for (const std::string_view refused : {"gpu.status", "fleet.status"}) {
        SCOPED_TRACE(refused);
        int refusals = 0;
        FakeDaemon daemon{[&](FakeDaemon& d) {
            for (json::object asked = d.request(); !asked.empty(); asked = d.request()) {
                if (asked.at("method").as_string() == refused) {
                    d.refuse(asked, {ErrorCode::internal, "asking the driver", ""});
                    ++refusals;
                } else {
                    d.answer(asked, {{"models", {{{"model", "voice"}, {"replica", 0}, {"device", "cuda:0"}}}}});
                }
            }
        }};
        const std::string path = daemon.path();
        const Ran once = ran({"--socket", path.c_str(), "top", "--once", "--json"});
        daemon.finish();
        EXPECT_EQ(refusals, 1);
        EXPECT_EQ(once.status, refused == "gpu.status" ? exit_done : exit_failed);
        if (once.status == exit_failed) {
            EXPECT_THAT(once.err, HasSubstr("asking the driver"));
            continue;
        }
        const json::object shown = json::parse(once.out).as_object();
        EXPECT_EQ(shown.at("models").at(0).at("model"), "voice");
        EXPECT_EQ(shown.at("gpus"), json::array{});
    }
}

}  // namespace
}  // namespace bulkhead::cli
