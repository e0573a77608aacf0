-- SPDX-License-Identifier: Apache-2.0 OR MIT
-- Dissects anywarp's datagrams over UDP, and its private control messages over TCP, in Wireshark and tshark:
--
--   tshark -X lua_script:anywarp.lua -r FILE
--
-- Wireshark loads this file if it is copied into the folder for plugins. Datagrams can be filtered by the fields below,
-- such as anywarp.id, anywarp.qkey and anywarp.opcode, and control messages over TCP by anywarp_control.
-- crates/core/src/wire/dgram.rs and control.rs describe the formats.

local OPCODES = {
    [0] = "Write", "Read Request", "Read Response", "Send", "Send with Invalidate", "Send with Solicited Event",
    "Send with Solicited Event and Invalidate", "Terminate", "Immediate", "Immediate with Solicited Event",
    "Atomic Request", "Atomic Response", [15] = "Write-Record or Control",
}
local KINDS = {
    "Hello", "Ack", "RNR", "Restart", "NAK", "Send Immediate", "Ping", "Pong", "Bye", "Select SRQ", "Cookie",
    "Handover",
}
local HANDOVERS = { [0] = "Offer", "Take", "Refuse", "Switch", "Offer Trunk", "Take Trunk" }
local SUB_OPERATIONS = { [0] = "plain", "Write-Record", "Write-Record with Immediate", "error report" }

-- ------------------------------------------------------------------ control messages

-- Returns the text for a control message. `header` is its untagged DDP header, 18 bytes. Over TCP no payload follows it.
local function control_text(header)
    local kind, arg = header(2, 1):uint(), header(5, 1):uint()
    local seq, extra = header(10, 4):uint(), header(14, 4):uint()
    local name = KINDS[kind] or ("kind " .. kind)
    if kind == 1 then
        return string.format("%s version %d features 0x%08x", name, arg, extra)
    elseif kind == 2 or kind == 4 then
        return string.format("%s seq %d", name, seq)
    elseif kind == 3 then
        return string.format("%s seq %d timer %d", name, seq, arg)
    elseif kind == 5 then
        return string.format("%s seq %d status %d", name, seq, arg)
    elseif kind == 6 then
        return string.format("%s 0x%08x", name, extra)
    elseif kind == 10 then
        return string.format("%s %d", name, extra)
    elseif kind == 12 then
        name = string.format("%s %s", name, HANDOVERS[arg] or arg)
        if arg == 0 then
            return string.format("%s process %d descriptor %d", name, seq, extra)
        elseif arg == 1 then
            return string.format("%s proof 0x%08x%08x", name, seq, extra)
        end
    end
    return name
end

-- ------------------------------------------------------------------ datagrams

local dg = Proto("anywarp", "anywarp datagram")
local f = dg.fields
f.kind = ProtoField.string("anywarp.kind", "Kind")
f.version = ProtoField.uint8("anywarp.version", "Version", base.DEC, nil, 0xf0)
f.has_immediate = ProtoField.bool("anywarp.flags.immediate", "Immediate", 8, nil, 0x01)
f.commit = ProtoField.bool("anywarp.flags.commit", "Commit", 8, nil, 0x02)
f.parity = ProtoField.bool("anywarp.flags.parity", "Parity", 8, nil, 0x04)
f.epoch = ProtoField.uint16("anywarp.epoch", "Epoch", base.HEX)
f.qkey = ProtoField.uint32("anywarp.qkey", "Q_Key", base.HEX)
f.id = ProtoField.uint32("anywarp.id", "Message")
f.length = ProtoField.uint32("anywarp.length", "Message length")
f.offset = ProtoField.uint32("anywarp.offset", "Offset in the message")
f.sub = ProtoField.uint8("anywarp.sub_operation", "Sub-operation", base.DEC, SUB_OPERATIONS)
f.attributes = ProtoField.uint8("anywarp.attributes", "Attributes", base.HEX)
f.solicited = ProtoField.bool("anywarp.attributes.solicited", "Solicited event", 8, nil, 0x01)
f.reserved = ProtoField.bool("anywarp.attributes.reserved", "Reserved", 8, nil, 0x02)
f.final_copy = ProtoField.bool("anywarp.attributes.final_copy", "Copy of the final datagram", 8, nil, 0x04)
f.single = ProtoField.bool("anywarp.attributes.not_aggregated", "Not aggregated", 8, nil, 0x08)
f.group = ProtoField.uint8("anywarp.parity.group", "Datagrams per parity datagram", base.DEC, nil, 0xf0)
f.segment = ProtoField.uint16("anywarp.parity.segment", "Payload length of each datagram except the last")
f.cookie = ProtoField.uint64("anywarp.cookie", "Cookie", base.HEX)
f.rd_data = ProtoField.bool("anywarp.rd.data", "Data", 8, nil, 0x01)
f.rd_challenge = ProtoField.bool("anywarp.rd.challenge", "Challenge", 8, nil, 0x02)
f.rd_not_ready = ProtoField.bool("anywarp.rd.not_ready", "Not ready", 8, nil, 0x04)
f.rd_ack_now = ProtoField.bool("anywarp.rd.ack_now", "Acknowledge at once", 8, nil, 0x08)
f.rd_runs = ProtoField.uint8("anywarp.rd.runs", "Runs")
f.rd_refused = ProtoField.uint8("anywarp.rd.refused", "Refused, with status")
f.rd_token = ProtoField.uint32("anywarp.rd.token", "Token", base.HEX)
f.rd_echo = ProtoField.uint32("anywarp.rd.echo", "Echo of the peer's token", base.HEX)
f.rd_seq = ProtoField.uint32("anywarp.rd.seq", "Number")
f.rd_base = ProtoField.uint32("anywarp.rd.base", "First packet that may be retransmitted")
f.rd_ack_counts = ProtoField.bool("anywarp.rd.ack_counts", "Acknowledges", 8, nil, 0x01)
f.rd_ack_soon = ProtoField.bool("anywarp.rd.ack_soon", "Acknowledge soon", 8, nil, 0x02)
f.rd_ack = ProtoField.uint32("anywarp.rd.ack", "Delivered before")
f.rd_window = ProtoField.uint32("anywarp.rd.window", "Window")
f.rd_time = ProtoField.uint32("anywarp.rd.time", "Time, microseconds")
f.rd_time_echo = ProtoField.uint32("anywarp.rd.time_echo", "Time answered")
f.rd_run_start = ProtoField.uint32("anywarp.rd.run.start", "Arrived from")
f.rd_run_end = ProtoField.uint32("anywarp.rd.run.end", "Arrived before")
f.dst = ProtoField.uint8("anywarp.dst_index", "Destination index")
f.src = ProtoField.uint8("anywarp.src_index", "Source index")
f.immediate = ProtoField.uint32("anywarp.immediate", "Immediate data", base.HEX)
f.tagged = ProtoField.bool("anywarp.ddp.tagged", "Tagged", 8, nil, 0x80)
f.last = ProtoField.bool("anywarp.ddp.last", "Last", 8, nil, 0x40)
f.ddp_version = ProtoField.uint8("anywarp.ddp.version", "DDP version", base.DEC, nil, 0x03)
f.rdmap_version = ProtoField.uint8("anywarp.rdmap.version", "RDMAP version", base.DEC, nil, 0xc0)
f.opcode = ProtoField.uint8("anywarp.opcode", "Opcode", base.HEX, OPCODES, 0x0f)
f.stag = ProtoField.uint32("anywarp.ddp.stag", "STag", base.HEX)
f.to = ProtoField.uint64("anywarp.ddp.to", "Tagged offset", base.HEX)
f.inv_stag = ProtoField.uint32("anywarp.rdmap.inv_stag", "Invalidate STag", base.HEX)
f.qn = ProtoField.uint32("anywarp.ddp.qn", "Queue number")
f.msn = ProtoField.uint32("anywarp.ddp.msn", "Message sequence number")
f.mo = ProtoField.uint32("anywarp.ddp.mo", "Message offset")
f.report_end = ProtoField.uint32("anywarp.report.end", "End of the payload last seen")
f.report_room = ProtoField.uint32("anywarp.report.room", "Room")
f.payload = ProtoField.bytes("anywarp.payload", "Payload")
f.crc = ProtoField.uint32("anywarp.crc", "CRC32C", base.HEX)
f.cm_kind = ProtoField.uint8("anywarp.cm.kind", "Kind", base.DEC, { "Request", "Reply" }, 0x0f)
f.cm_len = ProtoField.uint16("anywarp.cm.private_data_length", "Private data length")
f.cm_id = ProtoField.uint32("anywarp.cm.id", "Request", base.HEX)
f.cm_status = ProtoField.uint8("anywarp.cm.status", "Status")
f.cm_qpn = ProtoField.uint32("anywarp.cm.qpn", "Queue pair number", base.HEX)
f.cm_qkey = ProtoField.uint32("anywarp.cm.qkey", "Q_Key", base.HEX)
f.cm_data = ProtoField.bytes("anywarp.cm.private_data", "Private data")

local bad_crc = ProtoExpert.new("anywarp.crc.bad", "Wrong CRC", expert.group.CHECKSUM, expert.severity.ERROR)
local malformed = ProtoExpert.new("anywarp.malformed", "Shorter than its headers", expert.group.MALFORMED,
    expert.severity.ERROR)
dg.experts = { bad_crc, malformed }

-- CRC32C (RFC 3720 appendix B.4). Uses Wireshark's module `bit`, because Lua 5.1 to 5.4 have no common bit operators.
local xor, shift, band = bit.bxor, bit.rshift, bit.band
local TABLE = {}
for n = 0, 255 do
    local crc = n
    for _ = 1, 8 do
        crc = band(crc, 1) == 1 and xor(shift(crc, 1), 0x82f63b78) or shift(crc, 1)
    end
    TABLE[n] = crc
end
local function crc32c(tvb)
    local bytes = tvb:bytes()
    local crc = 0xffffffff
    for i = 0, bytes:len() - 1 do
        crc = xor(TABLE[band(xor(crc, bytes:get_index(i)), 0xff)], shift(crc, 8))
    end
    crc = xor(crc, 0xffffffff)
    return crc < 0 and crc + 4294967296 or crc
end

local function dissect_cm(tvb, tree)
    tree:add(f.kind, tvb(0, 1), "connection manager")
    tree:add(f.version, tvb(1, 1))
    tree:add(f.cm_kind, tvb(1, 1))
    tree:add(f.cm_len, tvb(2, 2))
    tree:add(f.cm_id, tvb(4, 4))
    local at, kind = 8, band(tvb(1, 1):uint(), 0x0f)
    if kind == 2 then
        if tvb:len() < 24 then return nil end
        tree:add(f.cm_status, tvb(8, 1))
        tree:add(f.cm_qpn, tvb(12, 4))
        tree:add(f.cm_qkey, tvb(16, 4))
        at = 20
    end
    local len = tvb:len() - 4 - at
    if len < 0 then return nil end
    if len > 0 then tree:add(f.cm_data, tvb(at, len)) end
    return kind == 2 and "CM Reply" or "CM Request"
end

local function dissect_segment(tvb, tree)
    tree:add(f.kind, tvb(0, 1), "segment")
    local flags = tvb(1, 1)
    for _, field in ipairs({ f.version, f.has_immediate, f.commit, f.parity }) do tree:add(field, flags) end
    tree:add(f.epoch, tvb(2, 2))
    tree:add(f.qkey, tvb(4, 4))
    tree:add(f.id, tvb(8, 4))
    tree:add(f.length, tvb(12, 4))
    tree:add(f.offset, tvb(16, 4))
    tree:add(f.sub, tvb(20, 1))
    local attributes = tree:add(f.attributes, tvb(21, 1))
    for _, field in ipairs({ f.solicited, f.reserved, f.final_copy, f.single, f.group }) do attributes:add(field, tvb(21, 1)) end
    tree:add(f.dst, tvb(22, 1))
    tree:add(f.src, tvb(23, 1))
    if shift(tvb(21, 1):uint(), 4) > 0 then tree:add(f.segment, tvb(24, 2)) end
    local at = 26
    if band(flags:uint(), 0x01) ~= 0 then
        if tvb:len() < at + 8 + 4 then return nil end
        tree:add(f.immediate, tvb(at, 4))
        at = at + 8
    end
    if tvb:len() < at + 14 + 4 then return nil end
    local tagged = band(tvb(at, 1):uint(), 0x80) ~= 0
    local header_len = tagged and 14 or 18
    if tvb:len() < at + header_len + 4 then return nil end
    local header = tvb(at, header_len)
    local ddp = tree:add(header, "DDP and RDMAP header")
    for _, field in ipairs({ f.tagged, f.last, f.ddp_version }) do ddp:add(field, tvb(at, 1)) end
    for _, field in ipairs({ f.rdmap_version, f.opcode }) do ddp:add(field, tvb(at + 1, 1)) end
    if tagged then
        ddp:add(f.stag, tvb(at + 2, 4))
        ddp:add(f.to, tvb(at + 6, 8))
    else
        ddp:add(f.inv_stag, tvb(at + 2, 4))
        ddp:add(f.qn, tvb(at + 6, 4))
        ddp:add(f.msn, tvb(at + 10, 4))
        ddp:add(f.mo, tvb(at + 14, 4))
    end
    local opcode = band(tvb(at + 1, 1):uint(), 0x0f)
    local what = OPCODES[opcode] or ("opcode " .. opcode)
    at = at + header_len
    local len = tvb:len() - 4 - at
    if opcode == 15 and tagged then
        what = "Write-Record"
    elseif opcode == 15 then
        what = control_text(header)
        if header(2, 1):uint() == 11 and len == 8 then
            tree:add(f.cookie, tvb(at, 8))
        elseif len == 8 then
            tree:add(f.report_end, tvb(at, 4))
            tree:add(f.report_room, tvb(at + 4, 4))
        end
    end
    if len > 0 then tree:add(f.payload, tvb(at, len)) end
    return string.format("%s, message %d, bytes %d to %d of %d", what, tvb(8, 4):uint(), tvb(16, 4):uint(),
        tvb(16, 4):uint() + len, tvb(12, 4):uint())
end

-- A packet of reliable datagrams: its header, and the datagram in it, which has no separate CRC.
local function dissect_packet(tvb, tree)
    tree:add(f.kind, tvb(0, 1), "packet")
    local flags = tvb(1, 1)
    for _, field in ipairs({ f.version, f.rd_data, f.rd_challenge, f.rd_not_ready, f.rd_ack_now }) do
        tree:add(field, flags)
    end
    local runs, refused = tvb(2, 1):uint(), tvb(3, 1):uint()
    tree:add(f.rd_runs, tvb(2, 1))
    if refused ~= 0 then tree:add(f.rd_refused, tvb(3, 1)) end
    tree:add(f.rd_token, tvb(4, 4))
    tree:add(f.rd_echo, tvb(8, 4))
    tree:add(f.rd_seq, tvb(12, 4))
    tree:add(f.rd_base, tvb(16, 4))
    tree:add(f.rd_ack_counts, tvb(20, 1))
    tree:add(f.rd_ack_soon, tvb(20, 1))
    tree:add(f.dst, tvb(22, 1))
    tree:add(f.src, tvb(23, 1))
    tree:add(f.rd_ack, tvb(24, 4))
    tree:add(f.rd_window, tvb(28, 4))
    tree:add(f.rd_time, tvb(32, 4))
    tree:add(f.rd_time_echo, tvb(36, 4))
    local at = 40
    if runs > 16 or tvb:len() < at + 8 * runs + 4 then return nil end
    for _ = 1, runs do
        tree:add(f.rd_run_start, tvb(at, 4))
        tree:add(f.rd_run_end, tvb(at + 4, 4))
        at = at + 8
    end
    local text = string.format("packet %d", tvb(12, 4):uint())
    if band(flags:uint(), 0x02) ~= 0 then
        text = "challenge"
    elseif band(flags:uint(), 0x01) == 0 then
        text = "no data"
    end
    if band(tvb(20, 1):uint(), 0x01) ~= 0 then text = text .. string.format(", ack %d", tvb(24, 4):uint()) end
    if refused ~= 0 then text = text .. string.format(", refused with %d", refused) end
    if band(flags:uint(), 0x01) ~= 0 then
        -- dissect_segment expects a CRC after the datagram. Here the CRC of the packet is at this position.
        if tvb:len() < at + 44 then return nil end
        local inner = dissect_segment(tvb(at):tvb(), tree:add(dg, tvb(at, tvb:len() - 4 - at), "datagram"))
        if inner == nil then return nil end
        text = text .. ": " .. inner
    end
    return text
end

function dg.dissector(tvb, pinfo, root)
    local kind = tvb(0, 1):uint()
    local cm = kind == 0xdd
    local tree = root:add(dg, tvb())
    local text = nil
    if tvb:len() >= (cm and 12 or 44) then
        text = (cm and dissect_cm or kind == 0xde and dissect_packet or dissect_segment)(tvb, tree)
    end
    if text == nil then
        tree:add_proto_expert_info(malformed)
        text = "malformed"
    else
        local covered = tvb:len() - 4
        tree:add_le(f.crc, tvb(covered, 4))
        -- The CRC of a truncated packet cannot be checked.
        if tvb:len() == tvb:reported_len() and crc32c(tvb(0, covered)) ~= tvb(covered, 4):le_uint() then
            tree:add_proto_expert_info(bad_crc)
        end
        tree:append_text(": " .. text)
    end
    pinfo.cols.protocol = "anywarp"
    pinfo.cols.info = text
end

-- anywarp's datagrams are recognized by their first two bytes: a kind, and version 1.
local function is_ours(tvb, pinfo, root)
    if tvb:len() < 12 then return false end
    local kind, version = tvb(0, 1):uint(), tvb(1, 1):uint()
    if kind < 0xdc or kind > 0xde or shift(version, 4) ~= 1 then return false end
    dg.dissector(tvb, pinfo, root)
    return true
end
dg:register_heuristic("udp", is_ours)

-- ------------------------------------------------------------------ control messages on a stream

-- Wireshark dissects iWARP over TCP itself and shows these messages as opcode 15. The following postdissector shows
-- their content.
local control = Proto("anywarp_control", "anywarp control message")
local control_field = ProtoField.string("anywarp_control.message", "Message")
control.fields = { control_field }
local segments = Field.new("iwarp_ddp_rdmap")

function control.dissector(_, pinfo, root)
    for _, segment in ipairs({ segments() }) do
        local range = segment.range
        -- Untagged and last, DDP and RDMAP version 1, opcode 15, queue 4.
        if range:len() >= 18 and range(0, 1):uint() == 0x41 and range(1, 1):uint() == 0x4f
            and range(6, 4):uint() == 4 then
            local text = control_text(range)
            root:add(control, range, "anywarp control message: " .. text):add(control_field, range(0, 18), text)
            pinfo.cols.info:append(" [" .. text .. "]")
        end
    end
end
register_postdissector(control)
