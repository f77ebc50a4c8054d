#pragma once

#include <cctype>
#include <future>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "supervisor/crash/crash_report.h"
#include "tests/unit/supervisor/adoption_fixture.h"
#include "tests/unit/supervisor/page_owner.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor::test {

using bulkhead::test::TemporaryFolder;

/// A script of what a person, a worker, the keeper and supervisors do to one replica, and of what
/// must then hold.
///
/// Steps are separated by ';' or the end of a line, their words by blanks; 'quoted' text is one
/// word. An expected text that begins with '~' is a part of the text. PATH is "a.b" for a member of
/// a member, "a.size" for the size of an array.
///   a person     load [when_due|MILLISECONDSms], unload, preload, opens CODE|ok,
///                gpu_quarantined UUID
///   the file     declare KEY VALUE, gpu [TEXT] (on the GPU of a fake NVML, which
///                says TEXT besides)
///   the worker   ready (loads it first), spawned|loading|ready N (the Nth process), worker N (is
///                meant from now on), says TYPE [KEY=VALUE]…, overruns, prints TEXT, closes (its
///                link), pages (says hello with a page), paged (ready, with a page), runs TEXT,
///                page_dies
///   the keeper   exits SIGNAL|STATUS [remains] (something of it may still run), obeys [SIGNAL…]
///                (which end a worker), spawn_fails
///   supervisors  dies, record KEY VALUE (in what it left), adopts, answers PHASE [KEY=VALUE]…,
///                receipt_told, hold and go_on (what is done off the loop), turns (of the loop)
///   waits        state S, phase P, got TYPE, gets SIGNAL, channels N, unloads N, reports N,
///                hung_up, overdue, settled (off the loop), declared (the process is known, and
///                what it is of), loads N [CODE|ok|* [ATTEMPT [REMEDY]]], receipt none|ENDED
///                [PATH=VALUE]…, forgotten GENERATION…
///   checks       is S, lacks TYPE, signals [SIGNAL…] (to its group: SIGNAL*), workers N, adopted
///                N, loads N now, forgotten, replaced, found, reaped, kept_receipt none|ENDED, told
///                PATH TEXT (in its configuration), environment TEXT, sentence TEXT, logged TEXT,
///                row|why|graphs|ledger|report PATH TEXT, log GENERATION TEXT
class Scenario : public AdoptionTest {
public:
    using Words = std::vector<std::string>;

    explicit Scenario(std::string script) : script_{std::move(script)} {
        context_.crash_reports = std::make_shared<CrashReports>(folder_.path() / "crashes");
    }

    void TestBody() override {
        for (const Words& words : steps(script_)) {
            std::string step;
            for (const std::string& word : words) step += word + " ";
            SCOPED_TRACE(step);
            play(words);
            if (HasFatalFailure()) return;
        }
        // A report may still be on its way into the folder that goes.
        held_.reset();
        EXPECT_TRUE(wait([this] { return blocking_.waiting() == 0; }));
    }

private:
    static std::vector<Words> steps(const std::string& script) {
        std::vector<Words> all(1);
        std::string word;
        bool quoted = false, begun = false;
        int depth = 0;
        const auto end_word = [&] {
            if (begun) all.back().push_back(std::exchange(word, {}));
            begun = false;
        };
        for (const char c : script + "\n") {
            if (c == '\'') {
                quoted = !quoted;
                begun = true;
            } else if (!quoted && depth == 0 && (c == ';' || c == '\n')) {
                end_word();
                if (!all.back().empty()) all.emplace_back();
            } else if (!quoted && depth == 0 && c == ' ') {
                end_word();
            } else {
                if (!quoted) depth += (c == '{' || c == '[') - (c == '}' || c == ']');
                word += c;
                begun = true;
            }
        }
        all.pop_back();
        return all;
    }
    static int signal_number(const std::string& name) {
        static const std::map<std::string, int> all{{"SIGSEGV", SIGSEGV}, {"SIGABRT", SIGABRT}, {"SIGKILL", SIGKILL},
                                                    {"SIGTERM", SIGTERM}, {"SIGCONT", SIGCONT}, {"SIGBUS", SIGBUS}};
        return all.at(name);
    }
    static Millis milliseconds(const std::string& text) { return Millis{std::stoll(text)}; }
    static WorkerState state_named(const std::string& name) {
        const auto found = std::find(worker_state_names.begin(), worker_state_names.end(), name);
        EXPECT_NE(found, worker_state_names.end()) << name;
        return static_cast<WorkerState>(found - worker_state_names.begin());
    }
    static json::value value_of(const std::string& text) {
        boost::system::error_code not_json;
        const json::value value = json::parse(text, not_json);
        return not_json ? json::value(text) : value;
    }
    /// "key=value" words from `first` on.
    static json::object members(const Words& words, std::size_t first) {
        json::object all;
        for (std::size_t i = first; i < words.size(); ++i) {
            const auto equals = words[i].find('=');
            all[words[i].substr(0, equals)] = value_of(words[i].substr(equals + 1));
        }
        return all;
    }
    static void expect_text(const std::string& text, const std::string& expected) {
        if (expected.starts_with('~'))
            EXPECT_THAT(text, testing::HasSubstr(expected.substr(1)));
        else
            EXPECT_EQ(text, expected);
    }
    /// Of "a.b" the member b of the member a; a text as it is, all else as JSON.
    static std::string text_at(json::value value, const std::string& path) {
        for (std::size_t begin = 0; begin <= path.size();) {
            const std::size_t dot = std::min(path.find('.', begin), path.size());
            const std::string key = path.substr(begin, dot - begin);
            const json::value* member = value.is_object() ? value.as_object().if_contains(key) : nullptr;
            if (key == "size" && value.is_array())
                value = json::value(value.as_array().size());
            else if (member == nullptr)
                return "absent";
            else
                value = json::value(*member);
            begin = dot + 1;
        }
        return value.is_string() ? std::string{value.as_string()} : json::serialize(value);
    }

    void declare(const std::string& key, const std::string& value) {
        auto& deadlines = spec_.deadlines;
        const std::map<std::string, Millis*> durations{{"load", &deadlines.load},
                                                       {"capture", &deadlines.capture},
                                                       {"drain", &deadlines.drain},
                                                       {"kill", &deadlines.kill}};
        if (durations.contains(key))
            *durations.at(key) = milliseconds(value);
        else if (key == "preload")
            spec_.preload = true;
        else if (key == "threads")
            spec_.threads = static_cast<std::uint32_t>(std::stoul(value));
        else if (key == "device")
            spec_.device = value;
        else if (key == "restart")
            spec_.restart = config::RestartPolicy::never;
        else if (key == "graphs")
            spec_.graphs = config::Graphs::required;
        else if (key == "channels")
            spec_.channel.channels_max = static_cast<std::uint32_t>(std::stoul(value));
        else
            FAIL() << "no key of a declaration";
    }
    /// What it does off the loop waits until `go_on`.
    void hold() {
        blocking_.run(
            "waiting", [go = held_.emplace().get_future().share()] { return go.wait(), true; },
            [](const Result<bool>&) {});
    }
    void adopts() {
        found_ = keeper_.hand_over();
        if (!record_.empty()) {
            json::object ledger = json::parse(found_.back().ledger).as_object();
            for (const auto& [key, value] : record_) ledger[key] = value;
            found_.back().ledger = json::serialize(ledger);
        }
        adopt();
    }
    void expect_loads(const Words& words) {
        const std::size_t count = std::stoul(words[1]);
        const bool now = words.size() > 2 && words[2] == "now";
        ASSERT_TRUE(now || wait([&] { return loads_.size() >= count; })) << replica().sentence();
        ASSERT_EQ(loads_.size(), count);
        if (now || words.size() == 2) return;
        const Result<LoadedReplica>& last = loads_.back();
        ASSERT_TRUE(words[2] == "*" || words[2] == (last ? "ok" : to_string(last.error().code))) << words[2];
        if (last) {
            EXPECT_EQ(last->pid, worker_->pid);
        }
        if (words.size() > 3) expect_text(last.error().attempt, words[3]);
        if (words.size() > 4) expect_text(last.error().remedy, words[4]);
    }
    void expect_receipt(const Words& words) {
        ASSERT_TRUE(wait([&] { return !unloads_.empty(); }));
        ASSERT_TRUE(unloads_.back()) << unloads_.back().error().text();
        const json::object none{{"ended", "none"}};
        const json::value got = unloads_.back()->has_value() ? to_json(receipt()) : none;
        EXPECT_EQ(text_at(got, "ended"), words[1]);
        for (std::size_t i = 2; i < words.size(); ++i) {
            const auto equals = words[i].find('=');
            expect_text(text_at(got, words[i].substr(0, equals)), words[i].substr(equals + 1));
        }
    }
    void expect_unloads(std::size_t count) {
        ASSERT_TRUE(wait([&] { return unloads_.size() >= count; }));
        EXPECT_EQ(unloads_.size(), count);
        const auto pid_of = [](const auto& unloaded) { return *unloaded ? (*unloaded)->pid : 0; };
        for (const auto& unloaded : unloads_) EXPECT_EQ(pid_of(unloaded), pid_of(unloads_.front())) << "one receipt";
    }
    void expect_forgotten(const Words& words) {
        const Words expected(words.begin() + 1, words.end());
        Words generations;
        const auto is_so = [&] {
            generations.clear();
            for (const WorkerName& name : keeper_.forgotten) generations.push_back(std::to_string(name.generation));
            return generations == expected;
        };
        EXPECT_TRUE(expected.empty() ? is_so() : wait(is_so)) << testing::PrintToString(generations);
    }
    void expect_signals(const Words& words) {
        std::vector<std::pair<int, bool>> expected;
        for (std::size_t i = 1; i < words.size(); ++i) {
            const bool group = words[i].ends_with('*');
            expected.emplace_back(signal_number(words[i].substr(0, words[i].size() - (group ? 1 : 0))), group);
        }
        EXPECT_EQ(worker_->signals, expected);
    }

    void play(const Words& words) {
        const std::string& verb = words[0];
        const std::string first = words.size() > 1 ? words[1] : "", second = words.size() > 2 ? words[2] : "";
        const std::size_t count = !first.empty() && std::isdigit(first[0]) != 0 ? std::stoul(first) : 1;
        if (verb == "load")
            replica().load([this](Result<LoadedReplica> result) { loads_.push_back(std::move(result)); },
                           first == "when_due" ? Replica::Urgency::when_due : Replica::Urgency::now,
                           first.ends_with("ms") ? std::optional{milliseconds(first)} : std::nullopt);
        else if (verb == "unload")
            unload();
        else if (verb == "preload")
            replica().preload();
        else if (verb == "opens") {
            auto opened = replica().open_channel({"test", 1, 0});
            EXPECT_EQ(opened ? "ok" : to_string(opened.error().code), first);
            if (opened) opened_.push_back(std::move(*opened));
        } else if (verb == "gpu_quarantined")
            replica().gpu_was_quarantined(first);
        else if (verb == "declare")
            declare(first, second);
        else if (verb == "gpu") {
            spec_.device = "cuda:0";
            if (!fake_) fake_.emplace("");
            fake_->set("gpu GPU-a 10000000000 Fake\n" + first + "\n");
        } else if (verb == "spawned")
            worker_ = &spawned(count);
        else if (verb == "loading")
            worker_ = &loading(count);
        else if (verb == "ready") {
            worker_ = first.empty() ? &ready() : &loading(count);
            if (!first.empty()) worker_->ready();
            wait_for(WorkerState::ready);
        } else if (verb == "worker")
            worker_ = keeper_.workers.at(count - 1).get();
        else if (verb == "says") {
            json::object said{{"type", first}};
            for (const auto& [key, value] : members(words, 2)) said[key] = value;
            if (said.size() > 1 || (first != "hello" && first != "ready")) return worker_->say(said);
            first == "hello" ? worker_->hello() : worker_->ready();
        } else if (verb == "overruns")
            worker_->say({{"type", "overrun"}, {"method", "forward"}, {"running_ms", 31'000}, {"budget_ms", 30'000}});
        else if (verb == "prints")
            worker_->print(first + "\n");
        else if (verb == "closes") {
            worker_->channels.clear();
            worker_->link.reset();
        } else if (verb == "pages")
            worker_->hello(page_.emplace().page().memfd().get());
        else if (verb == "paged") {
            load();
            worker_ = &spawned();
            play({"pages"});
            ASSERT_TRUE(wait([&] { return worker_->got("configure"); }));
            worker_->ready();
            wait_for(WorkerState::ready);
        } else if (verb == "runs")
            page_->page().runs(first, 1);
        else if (verb == "page_dies")
            page_->die();
        else if (verb == "exits") {
            const bool by_signal = first.starts_with("SIG");
            keeper_.exit(*worker_, {by_signal, by_signal ? signal_number(first) : std::stoi(first), second.empty()});
        } else if (verb == "obeys")
            keeper_.obeys = [words](int number) {
                return std::any_of(words.begin() + 1, words.end(),
                                   [&](const std::string& name) { return signal_number(name) == number; });
            };
        else if (verb == "spawn_fails")
            keeper_.spawn_error = Error{ErrorCode::resources_exhausted, "starting a process for m/0: clone3: …", ""};
        else if (verb == "dies")
            supervisor_dies();
        else if (verb == "record")
            record_[first] = value_of(second);
        else if (verb == "adopts")
            adopts();
        else if (verb == "answers")
            answer(*worker_, first, members(words, 2));
        else if (verb == "receipt_told")
            replica().receipt_told();
        else if (verb == "hold")
            hold();
        else if (verb == "go_on")
            held_->set_value();
        else if (verb == "turns")
            for (int turn = 0; turn < 5; ++turn) io_.run_one_for(1ms);
        else if (verb == "state")
            wait_for(state_named(first));
        else if (verb == "loads")
            expect_loads(words);
        else if (verb == "receipt")
            expect_receipt(words);
        else if (verb == "unloads")
            expect_unloads(count);
        else if (verb == "forgotten")
            expect_forgotten(words);
        else if (const auto awaited = waits(first, count); awaited.contains(verb))
            ASSERT_TRUE(wait(awaited.at(verb))) << replica().sentence();
        else
            check(words, first, second, count);
    }
    std::map<std::string, std::function<bool()>> waits(const std::string& first, std::size_t count) {
        return {{"phase", [=, this] { return replica().process()->load.progress().phase == first; }},
                {"got", [=, this] { return worker_->got(first); }},
                {"gets", [=, this] { return worker_->got_signal(signal_number(first)); }},
                {"channels", [=, this] { return replica().channels() == count; }},
                {"reports", [=, this] { return context_.crash_reports->list("", 100).size() == count; }},
                {"hung_up", [this] { return at_end_of_file(opened_.back().client_end); }},
                {"overdue", [this] { return replica().process()->end.drain_deadline_passed(); }},
                {"settled", [this] { return blocking_.waiting() == 0; }},
                {"declared", [this] { return !replica().declaration().empty() && replica().process()->pid != 0; }}};
    }
    void check(const Words& words, const std::string& first, const std::string& second, std::size_t count) {
        const std::string& verb = words[0];
        if (verb == "is")
            EXPECT_EQ(to_string(replica().state()), first) << replica().sentence();
        else if (verb == "lacks")
            EXPECT_FALSE(worker_->got(first));
        else if (verb == "signals")
            expect_signals(words);
        else if (verb == "workers")
            EXPECT_EQ(keeper_.workers.size(), count);
        else if (verb == "adopted")
            EXPECT_EQ(context_.adopted, count);
        else if (verb == "replaced")
            EXPECT_TRUE(replica().is_being_replaced());
        else if (verb == "found")
            EXPECT_TRUE(replica().was_found());
        else if (verb == "reaped")
            for (const auto& worker : keeper_.workers) EXPECT_TRUE(worker->reaped);
        else if (verb == "kept_receipt") {
            const auto& kept = replica().kept_receipt();
            EXPECT_EQ(kept ? to_string(kept->ended) : "none", first);
            if (kept) {
                EXPECT_EQ(kept->pid, worker_->pid);
            }
        } else if (verb == "environment")
            EXPECT_THAT(worker_->environment, testing::Contains(first));
        else if (verb == "sentence")
            EXPECT_THAT(replica().sentence(), testing::HasSubstr(first));
        else if (verb == "log")
            EXPECT_EQ(log_.last_line(0, count), second);
        else if (verb == "logged")
            EXPECT_THAT(json::serialize(log_.tail(10)), testing::HasSubstr(first));
        else if (verb == "told")
            expect_text(text_at(worker_->received.at(0).at("model"), first), second);
        else if (verb == "row")
            expect_text(text_at(replica().row(), first), second);
        else if (verb == "why")
            expect_text(text_at(replica().why(), first), second);
        else if (verb == "graphs")
            expect_text(text_at(replica().graphs(), first), second);
        else if (verb == "ledger")
            expect_text(text_at(json::parse(keeper_.ledgers.at(worker_->name.generation)), first), second);
        else if (verb == "report")
            expect_text(text_at(context_.crash_reports->list("", 1).at(0), first), second);
        else
            FAIL() << "no verb of a scenario";
    }

    const std::string script_;
    TemporaryFolder folder_;
    std::optional<FakeGpus> fake_;
    std::optional<PageOwner> page_;
    std::optional<std::promise<void>> held_;
    FakeWorker* worker_ = nullptr;
    std::vector<OpenedChannel> opened_;
    json::object record_;
};

/// A test of this suite for each row: its name and its script.
inline bool play_scenarios(const char* suite, const char* file, int line,
                           std::initializer_list<std::pair<const char*, const char*>> rows) {
    for (const auto& [name, script] : rows)
        testing::RegisterTest(suite, name, nullptr, nullptr, file, line,
                              [script = std::string{script}]() -> testing::Test* { return new Scenario{script}; });
    return true;
}

}  // namespace bulkhead::supervisor::test
