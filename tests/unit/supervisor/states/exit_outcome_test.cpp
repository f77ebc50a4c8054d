#include "supervisor/states/exit_outcome.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace bulkhead::supervisor {
namespace {

using Text = std::string;

/// "busy SIGSEGV ready gpu": the state, the exit, then what else is so.
ExitFacts facts_of(const Text& text) {
    static const std::map<Text, int> signals{
        {"SIGSEGV", SIGSEGV}, {"SIGABRT", SIGABRT}, {"SIGKILL", SIGKILL}, {"SIGTERM", SIGTERM}};
    static const std::map<Text, ErrorCode> failures{{"config_invalid", ErrorCode::config_invalid},
                                                    {"load_failed", ErrorCode::load_failed},
                                                    {"out_of_memory", ErrorCode::out_of_memory},
                                                    {"deadline_exceeded", ErrorCode::deadline_exceeded},
                                                    {"cancelled", ErrorCode::cancelled},
                                                    {"resources_exhausted", ErrorCode::resources_exhausted}};
    static const std::map<Text, FirstSign> signs{
        {"end", FirstSign::end}, {"dying", FirstSign::dying}, {"judged", FirstSign::judged}, {"hung", FirstSign::hung}};
    static const std::map<Text, EndAsked> asked{{"unload", EndAsked::unload}, {"replacing", EndAsked::replacement}};
    static const std::map<Text, bool ExitFacts::*> flags{{"drain", &ExitFacts::drain_asked},
                                                         {"overdue", &ExitFacts::drain_overdue},
                                                         {"capturing", &ExitFacts::was_capturing},
                                                         {"ready", &ExitFacts::was_ready},
                                                         {"graphs-preferred", &ExitFacts::graphs_preferred},
                                                         {"gpu", &ExitFacts::gpu_granted},
                                                         {"gpu-refused", &ExitFacts::gpu_refused}};
    std::istringstream words{text};
    Text word;
    words >> word;
    ExitFacts facts;
    const auto state = std::find(worker_state_names.begin(), worker_state_names.end(), word);
    EXPECT_NE(state, worker_state_names.end()) << text;
    facts.state = static_cast<WorkerState>(state - worker_state_names.begin());
    while (words >> word) {
        const Text value = word.substr(word.find(':') + 1);
        if (signals.contains(word))
            facts.exit = ProcessExit{true, signals.at(word), true};
        else if (word.starts_with("status:"))
            facts.exit = ProcessExit{false, std::stoi(value), true};
        else if (word.starts_with("sent:"))
            facts.escalation = value == "SIGKILL" ? Escalation::sigkill : Escalation::sigterm;
        else if (word.starts_with("sign:"))
            facts.first_sign = signs.at(value);
        else if (asked.contains(word))
            facts.end_asked = asked.at(word);
        else if (word.starts_with("failed:"))
            facts.failure = failures.at(value);
        else
            facts.*flags.at(word) = true;
    }
    return facts;
}

Text text_of(EndMeaning meaning) {
    static constexpr std::array names{"known", "drained", "undrained", "as_asked", "unclear", "lost"};
    return names.at(static_cast<std::size_t>(meaning));
}

/// "lost crashed load_failed fails-loads": the meaning, for the receipt, for the policy, then
/// what else follows.
Text text_of(const ExitOutcome& outcome) {
    static constexpr std::array endings{"asked", "crashed", "load_failed", "hopeless", "gpu_failed", "gpu_refused"};
    Text text = text_of(outcome.meaning) + " " + Text{to_string(outcome.ended)} + " " +
                endings.at(static_cast<std::size_t>(outcome.ending));
    for (const auto& [is_so, word] : {std::pair{outcome.writes_report, " report"},
                                      {outcome.fails_loads, " fails-loads"},
                                      {outcome.gives_up_graphs, " no-graphs"},
                                      {outcome.unexplained_kill, " unexplained-kill"},
                                      {outcome.blames_gpu, " blames-gpu"}})
        if (is_so) text += word;
    return text;
}

const std::pair<const char*, const char*> exits[] = {
    // Asked for.
    {"stopping status:0 unload drain ready", "known drained asked"},
    {"draining status:0 unload drain ready", "drained drained asked"},
    {"draining status:1 unload drain overdue ready", "undrained terminated asked"},
    {"stopping SIGTERM unload sent:SIGTERM", "known terminated asked fails-loads"},
    {"stopping status:3 unload sent:SIGTERM ready", "known terminated asked"},
    {"stopping SIGKILL unload sent:SIGKILL ready", "known killed asked"},
    {"stopping SIGKILL unload sent:SIGTERM ready", "known crashed asked report"},
    {"stopping status:0 replacing drain", "known drained asked"},
    {"draining status:1 unload drain ready", "lost crashed asked report"},
    {"draining SIGSEGV unload drain overdue ready", "lost crashed asked report"},
    // While no supervisor ran.
    {"adopting status:0 unload drain ready", "as_asked drained asked"},
    {"adopting SIGKILL unload sent:SIGKILL ready", "as_asked killed asked"},
    {"adopting SIGKILL unload sent:SIGTERM ready", "lost crashed asked report unexplained-kill"},
    {"adopting status:0 ready", "lost crashed crashed report"},
    {"adopting SIGSEGV capturing graphs-preferred", "lost crashed crashed report no-graphs"},
    // Unasked.
    {"busy SIGSEGV ready gpu", "lost crashed crashed report blames-gpu"},
    {"ready status:0 ready", "lost crashed crashed report"},
    {"busy SIGKILL ready gpu", "lost crashed crashed report unexplained-kill"},
    {"crashed SIGKILL sent:SIGKILL sign:end ready gpu", "known crashed crashed report unexplained-kill"},
    {"crashed SIGTERM sent:SIGKILL sign:end ready gpu", "known crashed crashed report"},
    {"crashed SIGABRT sign:hung ready gpu", "known crashed crashed report blames-gpu"},
    {"crashed SIGKILL sent:SIGKILL sign:hung ready gpu", "known crashed crashed report blames-gpu"},
    {"crashed SIGSEGV sign:dying ready gpu", "known crashed crashed report blames-gpu"},
    {"crashed SIGSEGV unload sign:dying ready gpu", "known crashed asked report"},
    // Of a load.
    {"loading SIGSEGV", "lost crashed crashed report fails-loads"},
    {"loading status:78 gpu", "lost crashed hopeless report fails-loads"},
    {"crashed status:1 sign:judged failed:load_failed gpu", "known crashed load_failed fails-loads blames-gpu"},
    {"crashed status:1 sign:judged failed:config_invalid", "known crashed hopeless fails-loads"},
    {"crashed status:1 sign:judged failed:out_of_memory gpu", "known crashed load_failed fails-loads"},
    {"crashed SIGKILL sent:SIGKILL sign:judged failed:load_failed", "known crashed load_failed fails-loads"},
    {"crashed SIGSEGV sign:judged failed:load_failed", "known crashed load_failed report fails-loads"},
    {"crashed SIGKILL sent:SIGKILL sign:hung failed:deadline_exceeded", "known crashed load_failed report fails-loads"},
    // Of a capture: without graphs the next process serves who waits.
    {"capturing SIGSEGV capturing graphs-preferred gpu", "lost crashed crashed report no-graphs blames-gpu"},
    {"crashed SIGABRT sign:hung capturing graphs-preferred", "known crashed crashed report no-graphs"},
    {"capturing SIGSEGV capturing", "lost crashed crashed report fails-loads"},
    {"capturing SIGKILL capturing graphs-preferred gpu", "lost crashed crashed report fails-loads unexplained-kill"},
    {"crashed status:1 sign:judged capturing graphs-preferred failed:load_failed",
     "known crashed load_failed fails-loads"},
    {"stopping SIGTERM unload sent:SIGTERM capturing graphs-preferred", "known terminated asked fails-loads"},
    // Without a process.
    {"spawning failed:resources_exhausted gpu-refused", "lost crashed gpu_refused fails-loads"},
    {"spawning failed:resources_exhausted", "lost crashed load_failed fails-loads"},
    {"spawning failed:config_invalid", "lost crashed hopeless fails-loads"},
    {"stopping unload failed:cancelled", "known crashed asked fails-loads"},
};

const std::pair<const char*, const char*> link_ends[] = {
    {"ready", "lost"},
    {"loading unload", "lost"},
    {"crashed", "known"},
    {"stopping by-error", "known"},
    {"draining unload", "lost"},
    {"draining unload drain", "unclear"},
    {"draining unload drain by-error", "lost"},
    {"draining unload drain overdue by-error", "undrained"},
    {"adopting replacing", "as_asked"},
    {"adopting", "lost"},
};

TEST(ExitOutcome, FollowsFromTheFactsAsTheTableSays) {
    for (const auto& [facts, outcome] : exits) EXPECT_EQ(text_of(outcome_of(facts_of(facts))), outcome) << facts;
}

TEST(ExitOutcome, OfALinkFollowsFromTheFactsAsTheTableSays) {
    for (const auto& [text, meaning] : link_ends) {
        Text facts{text};
        const bool by_error = facts.ends_with(" by-error");
        if (by_error) facts.resize(facts.size() - Text{" by-error"}.size());
        EXPECT_EQ(text_of(meaning_of_link_end(facts_of(facts), by_error)), meaning) << text;
    }
}

/// Whatever was observed.
TEST(ExitOutcome, AReportIsOfACrashAndNothingOfWhatWasAskedForIsRestarted) {
    for (int state = 0; state < worker_state_count; ++state)
        for (int bits = 0; bits < 1 << 10; ++bits) {
            const auto bit = [&](int number) { return (bits >> number & 1) != 0; };
            ExitFacts facts;
            facts.state = static_cast<WorkerState>(state);
            if (bit(0))
                facts.exit = bit(1) ? ProcessExit{true, bit(2) ? SIGKILL : SIGTERM, true}
                                    : ProcessExit{false, bit(2) ? 1 : 0, true};
            facts.end_asked = bit(3) ? EndAsked::unload : EndAsked::no;
            facts.drain_asked = bit(4);
            facts.escalation = bit(5) ? Escalation::sigkill : Escalation::none;
            facts.first_sign = bit(6) ? FirstSign::end : FirstSign::none;
            facts.was_ready = bit(7);
            facts.was_capturing = facts.graphs_preferred = bit(8);
            facts.gpu_granted = bit(9);
            const ExitOutcome outcome = outcome_of(facts);
            EXPECT_TRUE(!outcome.writes_report || (facts.exit && outcome.ended == Ended::crashed));
            EXPECT_TRUE(facts.exit || outcome.fails_loads) << "nobody waits for what was never started";
            EXPECT_FALSE(outcome.fails_loads && outcome.gives_up_graphs);
            if (facts.end_asked == EndAsked::unload) {
                EXPECT_EQ(outcome.ending, Ending::asked);
                EXPECT_FALSE(outcome.blames_gpu || outcome.gives_up_graphs);
            }
            if (facts.first_sign != FirstSign::none && facts.exit) {
                EXPECT_EQ(outcome.ended, Ended::crashed);
            }
        }
}

}  // namespace
}  // namespace bulkhead::supervisor
