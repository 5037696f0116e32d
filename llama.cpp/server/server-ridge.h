#pragma once

// RidgeFill in the server: decides for each prompt whether it is filled, runs the steps of its prefill between the batches
// of the other slots, and sees to it that no exact request ever reuses a cell that is not pure.
//
// Life of a prompt, as server-context.cpp calls it:
//   plan()   how many cached rows may be reused, and whether the rest is filled
//   start()  the cache holds the reused rows and nothing else: begin
//   step()   once per loop: one step of one slot
//   stop()   the slot is released, wherever its prefill is
// When the last step is done, the slot's prompt holds the rows that are in the cache and the ordinary path goes on with the
// others: the end of the prompt, its logits and sampling are upstream's.

#include "server-queue.h"
#include "server-ridge-slot-file.h"
#include "server-ridge-source.h"
#include "server-task.h"

#include "llama-ridge.h"

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

class server_ridge {
  public:
    ~server_ridge() { reset(); }

    // what only the server can do
    struct hooks {
        std::function<bool()> free_space;                                        // give up an idle slot's rows; false if there are none
        std::function<void(int32_t id_slot, const std::string & message)> end_slot; // with an error
    };

    // load the maps; a file that is refused leaves one line in the log, and every prompt runs exactly
    void init(llama_context * ctx, const common_params & params, bool has_speculative, server_metrics & metrics, hooks hooks);

    // forget everything that belongs to the context, before it is freed
    void reset();

    // what was loaded last, where maps were asked for; any thread may ask, also while the server sleeps or wakes
    void add_to(json & props) const;

    // what a request that runs with these adapters may reuse
    server_ridge_want wanted(const server_task & task, const std::vector<common_adapter_lora_info> & lora) const;

    // n_past: rows of the prompt that are in the cache of the slot. Returns how many of them may be reused. The references
    // must stay valid until stop().
    int32_t plan(int32_t id_slot, const server_task & task, const std::vector<common_adapter_lora_info> & lora,
                 server_prompt & prompt, server_slot_stats & stats, int32_t n_past);

    // true if the batch must not hold the slot's rows: they come from step(), or the cache has no room and the slot was ended
    bool start(int32_t id_slot);

    bool is_active(int32_t id_slot) const;

    // rows of an unfinished prefill, for progress reports
    int32_t n_progress(int32_t id_slot) const;

    // run one step of one slot, the active ones in turn; on_progress is called where the client asked for reports
    void step(server_queue & queue, const std::function<void(int32_t id_slot)> & on_progress);

    void stop(int32_t id_slot);

    // The other slots found no free cells: give up the rows of the prompt that began to fill last, whose slot is ended. False
    // if none is filling.
    bool give_way();

    //
    // slot files: without maps they are upstream's, except that none with filled rows is restored
    //

    // before a slot is saved: throws std::runtime_error if a file cannot say what its rows are
    void check_save(const server_prompt & prompt) const;

    // afterwards: what the rows are. False if that failed, which the log explains
    bool add_record(const std::string & path, const server_prompt & prompt) const;

    struct slot_rows {
        std::string        error; // empty: the rows may be put into the cache
        server_ridge_cells cells;
    };

    // before a slot is touched: whether upstream can read this file, and what its rows are
    slot_rows check_restore(const std::string & path, int32_t id_slot, int32_t n_ctx) const;

  private:
    // one prompt between plan() and its last step
    struct job {
        const server_task * task   = nullptr;
        server_prompt     * prompt = nullptr;
        server_slot_stats * stats  = nullptr;

        std::vector<common_adapter_lora_info> lora;

        llama_ridge_params params = {};
        int32_t            n_past = 0;

        std::unique_ptr<server_ridge_work> work; // from start() on
    };

    llama_context    * ctx     = nullptr;
    llama_ridge_maps * maps    = nullptr;
    server_metrics   * metrics = nullptr;
    hooks              server;

    std::unique_ptr<server_ridge_source> source; // of mode transfer

    common_ridge_params defaults;

    std::string no_maps_reason;   // why no prompt of this server is filled, empty if maps are loaded
    std::string no_maps_message;  // the same for people
    std::string no_mapper_reason;  // the same of mode transfer
    std::string no_mapper_message;
    std::string no_fill_reason;   // why no prompt is filled although maps or a mapper are loaded

    std::vector<std::string> adapter_hashes; // of the content of each LoRA adapter of the server, if anything is loaded
    server_ridge_slot_file   here;           // model and cache, if anything is loaded

    mutable std::mutex mutex_props;
    json               props;     // null if nothing was asked for

    bool              kv_unified = false;
    std::set<int32_t> working;    // slots between plan() and stop()

    std::map<int32_t, job> jobs;  // by slot
    int32_t id_last = -1;         // slot of the last step

    bool asked () const { return !defaults.maps.empty() || !defaults.mapper.empty(); }
    bool loaded() const { return maps || source; }
    bool can(llama_ridge_mode mode) const { return mode == LLAMA_RIDGE_MODE_TRANSFER ? source != nullptr : maps != nullptr; }

    void load_maps    ();
    void load_source  (const common_params & params);
    void describe_here(const common_params & params);
    json describe         () const;
    json describe_transfer() const;

    llama_ridge_mode   mode_of(const server_ridge_request & request) const;
    std::string        adapters_key(const std::vector<common_adapter_lora_info> & lora) const;
    llama_ridge_params request_params(const server_ridge_request & request, llama_ridge_mode mode) const;
    std::string        provenance(llama_ridge_mode mode) const;
    int32_t            n_sink() const;

    std::string reason_for_exact(const server_task & task, const std::vector<common_adapter_lora_info> & lora, llama_ridge_mode mode) const;

    int32_t begin(int32_t id_slot, job & j);

    bool has_room_at_end(int32_t id_slot, const job & j) const;

    void finish     (int32_t id_slot, job & j);
    void run_exactly(int32_t id_slot, job & j, int32_t status);
    void end_slot   (int32_t id_slot, job & j, const std::string & why);
    void skip       (int32_t id_slot, job & j, const char * reason);
    void report     (int32_t id_slot, const server_task & task, const server_ridge_stats & stats);
};
